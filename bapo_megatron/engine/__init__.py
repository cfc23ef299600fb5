"""Engines, which sample: their interface (``base``), and one package per kind.

The configuration is a layer below and finds these names at run time, by this package's name.
"""

BUILT_IN = {
    "sglang": "",
    "local": "the transformers model in the collector's process: no server, and repeats bit for "
    "bit",
}
"""Built-in engines, with what ``rollout.engine`` says of them; the first is the default."""

WITH_SERVERS = ("sglang",)
"""Those that sample in servers, started by the run or named by ``rollout.servers``."""
