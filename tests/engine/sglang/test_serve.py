"""The ``serve`` command: servers of a rollout node, their keys, and how they end."""

from __future__ import annotations

import re
import shutil
import signal
import stat
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from bapo_megatron.engine.sglang.kind import SglangKind
from tests.engine.helpers import ask, descendants
from tests.launch import Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.helpers import MakeConfig

    Start = Callable[..., "Serving"]

pytestmark = pytest.mark.slow


class Serving(Launched):
    """The command with two fake servers, whose fate is in ``fate`` beside its run's directory."""

    def first_lines(self, number: int) -> list[str]:
        while (out := self.output()[0]).count("\n") < number:
            assert self.poll() is None, self.output()
            time.sleep(0.02)
        return out.splitlines()[:number]

    def end(self, number: signal.Signals | None = None) -> tuple[int | None, str, str]:
        """Exit status, output and errors, after a signal if there is one."""
        if number is not None:
            self.send_signal(number)
        output, errors = self.communicate(60)
        return self.poll(), output, errors


@pytest.fixture
def start_serve(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts the command; all that it started must be gone at the end."""
    for name in (ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "fate").write_text("serve")
    server = {"count": 2, "extra_args": [f"--fate={tmp_path / 'fate'}"]}
    (tmp_path / "config.yaml").write_text(make_config(server=server).model_dump_json())
    started: list[Serving] = []

    def start(*overrides: str, **environment: str) -> Serving:
        arguments = ("serve", str(tmp_path / "config.yaml"), *overrides)
        program = ("tests.fakes.fake_servers", *arguments)
        started.append(Serving(program=program, environment=environment))
        return started[-1]

    yield start
    for serving in started:
        serving.send_signal(signal.SIGKILL)
        serving.wait(20)
    assert not psutil.wait_procs(descendants(mentioning=str(tmp_path)), timeout=20)[1]


def addresses_in(line: str, key: str = "rollout.servers") -> list[str]:
    """What the trainer's argument names."""
    named = re.fullmatch(rf"'{re.escape(key)}=\[(.*)\]'", line)
    assert named is not None
    return named[1].split(",")


def test_servers_are_ready_when_their_addresses_are_shown_with_a_key_that_nobody_else_can_read(
    start_serve: Start, tmp_path: Path
) -> None:
    serving = start_serve()
    export, line = serving.first_lines(2)
    key_file = tmp_path / "run" / "admin_api_key"
    assert export == f"export {ADMIN_API_KEY_VARIABLE}=$(cat '{key_file}')"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key = key_file.read_text().strip()
    assert len(key) == 32
    assert [ask(f"{address}/ready") for address in addresses_in(line)] == [(200, key)] * 2
    servers = descendants(serving.pid)
    assert len(servers) == 2
    assert not any(key in " ".join(server.cmdline()) for server in servers)
    for number in range(2):
        log = (tmp_path / "run" / "logs" / f"sglang_{number}.log").read_text()
        assert log.endswith("fate: serve; an api key: False\n")
        assert key not in log
    status, _, errors = serving.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert key not in errors
    assert errors.count("ready; for the trainer's environment and command") == 1
    assert not any(server.is_running() for server in servers)

    again = start_serve()  # or another node with the same directory
    assert again.first_lines(2)[0] == export
    assert key_file.read_text().strip() == key
    assert sorted(path.name for path in key_file.parent.iterdir()) == ["admin_api_key", "logs"]


def test_a_teacher_is_served_with_its_weights(
    start_serve: Start, model_dir: Path, tmp_path: Path
) -> None:
    key = "algorithm.distillation.teacher"
    _, _, errors = start_serve("--teacher").end()
    refusal = f"bapo-megatron: {key}.path: must name the teacher for serve --teacher, got none; "
    assert errors.splitlines()[-1].startswith(refusal)
    teacher = tmp_path / "teacher"
    shutil.copytree(model_dir, teacher)
    serving = start_serve("--teacher", f"{key}.path={teacher}")
    assert len(addresses_in(serving.first_lines(2)[1], f"{key}.servers")) == 2
    for server in descendants(serving.pid):
        command = server.cmdline()
        assert f"--model-path={teacher}" in command
        assert "--weight-version=0" in command
        assert "--load-format=dummy" not in command


def test_servers_that_others_reach_want_a_key_for_generation_too(
    start_serve: Start, tmp_path: Path
) -> None:
    *exports, _ = start_serve("rollout.server.host=localhost").first_lines(3)
    key_file = tmp_path / "run" / "api_key"
    assert exports == [
        f"export {API_KEY_VARIABLE}=$(cat '{key_file}')",
        f"export {ADMIN_API_KEY_VARIABLE}=$(cat '{tmp_path / 'run' / 'admin_api_key'}')",
    ]
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    log = (tmp_path / "run" / "logs" / "sglang_localhost_0.log").read_text()
    assert log.endswith("fate: serve; an api key: True\n")


def test_keys_of_the_environment_are_used_and_kept_nowhere(
    start_serve: Start, tmp_path: Path
) -> None:
    admin, user = "admin-secret-of-27-bytes-ooo", "secret-of-16-byt"
    serving = start_serve(**{ADMIN_API_KEY_VARIABLE: admin, API_KEY_VARIABLE: user})
    (line,) = serving.first_lines(1)
    assert ask(f"{addresses_in(line)[0]}/ready") == (200, admin)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
    assert "an api key: True" in (tmp_path / "run" / "logs" / "sglang_1.log").read_text()
    status, _, errors = serving.end(signal.SIGINT)
    assert (status, errors.splitlines()[-1]) == (130, "bapo-megatron: interrupted")


@pytest.mark.parametrize("name", ["admin_api_key", "api_key"])
def test_an_empty_key_file_does_not_open_the_servers(
    start_serve: Start, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run").mkdir()
    key_file = tmp_path / "run" / name
    key_file.write_text("\n")
    status, output, errors = start_serve("rollout.server.host=localhost").end()
    assert (status, output) == (1, "")
    (line,) = errors.splitlines()
    assert line.startswith(f"bapo-megatron: {key_file}: a key must have at least 16 bytes")
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"server": {"host": "0.0.0.0"}}, r"rollout\.server\.host"),
        ({"server": {"tensor": 3}}, r"rollout\.server\.tensor"),
        ({"colocated": True}, r"rollout\.colocated"),
    ],
)
def test_what_cannot_be_served_is_refused(
    make_config: MakeConfig, rollout: dict[str, object], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: must "):
        SglangKind().serve(make_config(**rollout), print)
