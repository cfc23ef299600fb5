"""The newest row of ``metrics.jsonl`` for Prometheus."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bapo_megatron.config.schema import LogConfig

ShowRow = Callable[[Mapping[str, float]], None]
"""Takes a row as it is in ``metrics.jsonl``."""


class _NewestRow(Collector):
    """``a/b`` becomes ``bapo_a_b{name="a/b"}``: no two names become one."""

    def __init__(self) -> None:
        self.row: Mapping[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, value in self.row.items():
            family = "bapo_" + re.sub("[^a-zA-Z0-9_]", "_", name)
            gauge = families.setdefault(family, GaugeMetricFamily(family, name, labels=["name"]))
            gauge.add_sample(family, {"name": name}, value)
        return families.values()


@contextmanager
def rows_served(config: LogConfig) -> Iterator[ShowRow]:
    """Answer Prometheus within the block, if ``prometheus_port`` is set; yield what takes its rows.

    Raises:
        ValueError: The port is in use.
    """
    newest = _NewestRow()

    def take(row: Mapping[str, float]) -> None:
        newest.row = row

    if not config.prometheus_port:
        yield take
        return
    registry = CollectorRegistry()
    registry.register(newest)
    host, port = config.prometheus_host, config.prometheus_port
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(
            f"log.prometheus_port: cannot listen on {host}:{port} ({error.strerror}); end what "
            "uses it, or choose another port (or log.prometheus_host)"
        ) from error
    try:
        yield take
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
