"""What Prometheus scrapes; ``tests/trainer/test_stub_runs.py`` scrapes a run."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.telemetry.prometheus import rows_served
from tests.launch import free_port


def _scrape(port: int) -> set[tuple[str, str, float]]:
    """Metric, label and value of everything that is shown."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {(s.name, s.labels["name"], s.value) for family in families for s in family.samples}


def test_names_that_prometheus_cannot_tell_apart_keep_their_values() -> None:
    config = LogConfig(prometheus_port=free_port())
    with rows_served(config) as show:
        show({"step": 3, "reward/a.b": 1.5, "reward/a/b": -2.0})
        found = _scrape(config.prometheus_port)
    assert found == {
        ("bapo_step", "step", 3.0),
        ("bapo_reward_a_b", "reward/a.b", 1.5),
        ("bapo_reward_a_b", "reward/a/b", -2.0),
    }


def test_an_evaluation_stays_until_the_next_one_and_nothing_else_does() -> None:
    # With ``eval.overlap``, row 4 is written together with the late row 3.
    config = LogConfig(prometheus_port=free_port())
    with rows_served(config) as show:
        show({"step": 3, "data/easy/reward_mean": 1.0, "eval/a/avg_at_k": 0.5, "eval/b/wall_s": 7})
        show({"step": 4, "reward/mean": 0.25})
        between = _scrape(config.prometheus_port)
        show({"step": 5, "eval/a/avg_at_k": 0.75})
        after = _scrape(config.prometheus_port)
    assert between == {
        ("bapo_step", "step", 4.0),
        ("bapo_reward_mean", "reward/mean", 0.25),
        ("bapo_eval_step", "eval/step", 3.0),
        ("bapo_eval_a_avg_at_k", "eval/a/avg_at_k", 0.5),
        ("bapo_eval_b_wall_s", "eval/b/wall_s", 7.0),
    }
    assert after == {
        ("bapo_step", "step", 5.0),
        ("bapo_eval_step", "eval/step", 5.0),
        ("bapo_eval_a_avg_at_k", "eval/a/avg_at_k", 0.75),
    }


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ValueError, match="port") as caught,
            rows_served(LogConfig(prometheus_port=port)),
        ):
            pass
    assert str(caught.value) == (
        f"log.prometheus_port: cannot listen on 127.0.0.1:{port} (Address already in use); end "
        "what uses it, or choose another port (or log.prometheus_host)"
    )
