"""What Prometheus scrapes; ``tests/trainer/test_stub_runs.py`` scrapes a run."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.telemetry.prometheus import rows_served
from tests.launch import free_port


def test_names_that_prometheus_cannot_tell_apart_keep_their_values() -> None:
    config = LogConfig(prometheus_port=free_port())
    with rows_served(config) as show:
        show({"step": 3, "reward/a.b": 1.5, "reward/a/b": -2.0})
        url = f"http://127.0.0.1:{config.prometheus_port}/metrics"
        with urllib.request.urlopen(url) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
    found = {(s.name, s.labels["name"], s.value) for family in families for s in family.samples}
    assert found == {
        ("bapo_step", "step", 3.0),
        ("bapo_reward_a_b", "reward/a.b", 1.5),
        ("bapo_reward_a_b", "reward/a/b", -2.0),
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
