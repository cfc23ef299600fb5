"""The newest row of ``metrics.jsonl`` for Prometheus, with the newest evaluation."""

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
    """``a/b`` becomes ``bapo_a_b{name="a/b"}``: no two names become one.

    Most rows have no evaluation, and the row of a step with one may be replaced at once. So the
    newest ``eval/…`` stay, with ``eval/step``, the step that they belong to.
    """

    def __init__(self) -> None:
        self._row: Mapping[str, float] = {}
        self._evaluated: Mapping[str, float] = {}

    def take(self, row: Mapping[str, float]) -> None:
        """Answer with this row from now on."""
        evaluated = {name: value for name, value in row.items() if name.startswith("eval/")}
        if evaluated:
            self._evaluated = {"eval/step": row["step"], **evaluated}
        self._row = {**row, **self._evaluated}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, value in self._row.items():
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
    if not config.prometheus_port:
        yield newest.take
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
        yield newest.take
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
