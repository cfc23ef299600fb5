"""From the name of an engine to its code."""

from __future__ import annotations

import pytest

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine.load import EngineKind, load_kind
from bapo_megatron.engine.sglang.kind import Kind as SglangKind


class OwnKind(SglangKind):
    """Somebody's own."""


def test_an_engine_is_named_by_its_short_name_or_by_its_class() -> None:
    kind: EngineKind = load_kind("sglang")
    assert type(kind) is SglangKind
    assert type(load_kind("tests.engine.test_load:OwnKind")).__name__ == "OwnKind"


def test_an_engine_that_cannot_be_imported_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.engine: .*not_there"):
        load_kind("not_there:Kind")
