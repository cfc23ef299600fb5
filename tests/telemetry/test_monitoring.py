"""The dashboard and the alert rules of examples/monitoring, on a real Prometheus.

It need not be installed (Debian: ``apt-get install prometheus``): without it these tests are
skipped, in CI too.
"""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.telemetry.sinks import read_metrics, rows_served
from tests.launch import REPOSITORY, free_port

MONITORING = REPOSITORY / "examples" / "monitoring"
DEMO = Path(__file__).parent / "demo_metrics.jsonl"
"""Rows of ``make demo eval.every_steps=8 checkpoint.every_steps=8``."""
_TIMEOUT_S = 120.0


def _program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"no {name} was found; install it (Debian: apt-get install prometheus)")
    return program


def dashboard_queries() -> list[str]:
    """The queries of all panels, for all runs."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    return [target["expr"].replace("$run", ".*") for target in targets]


@contextlib.contextmanager
def prometheus(directory: Path, endpoint_port: int) -> Iterator[str]:
    """Run it with the shipped configuration, which scrapes every second here; yield its address."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{endpoint_port}"]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [_program("prometheus"), f"--config.file={directory / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield address
        finally:
            process.terminate()


def ask(address: str, query: str) -> list[Any]:
    """The result of an instant query; empty while Prometheus starts."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []
    return result


def until_answered(address: str, query: str) -> list[Any]:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not (result := ask(address, query)):
        assert time.monotonic() < deadline_s, f"{query}: no answer"
        time.sleep(0.2)
    return result


@pytest.mark.slow
def test_no_query_of_the_dashboard_is_empty_on_the_demos_endpoint(tmp_path: Path) -> None:
    log = LogConfig(prometheus_port=free_port())
    with rows_served(log) as show_row, prometheus(tmp_path, log.prometheus_port) as address:
        for row in read_metrics(DEMO):
            show_row(row)
        until_answered(address, "bapo_step")
        queries = dashboard_queries()
        assert len(queries) > 30
        assert [query for query in queries if not ask(address, query)] == []
        (step,) = until_answered(address, "bapo:step_s")
        last = read_metrics(DEMO)[-1]
        phases = [value for name, value in last.items() if name.startswith("time/")]
        assert float(step["value"][1]) == pytest.approx(sum(phases) - last["time/evaluation_s"])
        (job,) = ask(address, "up")
        assert job["metric"]["job"] == "bapo"  # of which BapoEndpointDown asks


def test_rules_and_configuration_are_valid_and_each_alert_fires() -> None:
    promtool = _program("promtool")
    for arguments in (
        ["check", "config", "examples/monitoring/prometheus.yml"],
        ["test", "rules", "tests/telemetry/alerts_test.yml"],
    ):
        result = subprocess.run(
            [promtool, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_metric_of_dashboard_and_rules_is_one_of_the_demos() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    queries = [*dashboard_queries(), *(rule["expr"] for rule in rules)]
    used = {name for query in queries for name in re.findall(r"\bbapo_\w+(?!\w*[.+])", query)}
    rows = read_metrics(DEMO)
    served = {"bapo_" + re.sub(r"\W", "_", name) for row in rows for name in row}
    assert used - {"bapo_eval_", "bapo_time_"} <= served
    fired = {rule["alert"] for rule in rules if "alert" in rule}
    cases = (Path(__file__).parent / "alerts_test.yml").read_text()
    assert fired == set(re.findall(r'alertname="(\w+)"\}', cases))
