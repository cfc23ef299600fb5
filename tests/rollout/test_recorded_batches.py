"""Batches of the driven engine are those that earlier versions formed, field by field.

The engine's tokens are integers' hashes, so the digests hold on every processor.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.agent.episodes import make_renderer
from tests.rollout import test_agents, test_repeats

pytestmark = pytest.mark.slow

RECORDED: dict[str, str] = json.loads(Path(__file__).with_name("recorded_batches.json").read_text())
AHEAD = {"async_steps": 1, "local": {"decode_steps_ahead": 3}}
STALE = {"max_age": 1, "measure": "mean", "action": "regenerate"}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "oversampled": {"oversample_groups": 3, "tokens_per_step": 90},
    "ahead": AHEAD | {"oversample_groups": 2},
    "far ahead": {"async_steps": 2, "local": {"decode_steps_ahead": 30}, "max_carries": 1},
    "stale": AHEAD | {"oversample_groups": 2, "staleness": STALE},
    "dynamic": AHEAD | {"dynamic_sampling": {"enabled": True, "max_groups_ratio": 2.0}},
    "not partial": {"partial": False, "oversample_groups": 2},
    "rounds": {"partial_tokens": 7},
    "lag": {"fixed_lag": 1},
}
OPTIONS: dict[str, dict[str, bool]] = {
    "alone": {},
    "environment": {"has_environment": True},
    "environment, groups, teacher": {
        "has_environment": True,
        "sees_groups": True,
        "has_teacher": True,
    },
}


def digest_of(batches: Sequence[bytes]) -> str:
    """Hash every decoded field that the recorded batches had; later ones have their defaults."""
    digest = hashlib.sha256()
    for batch in map(test_repeats.decoded, batches):
        stats = asdict(batch.stats)
        assert stats["environment_counts"].pop("agent_untrained_calls", 0.0) == 0.0
        digest.update(repr((batch.step, batch.version, stats)).encode())
        for sequence in batch.sequences:
            fields = asdict(sequence)
            del fields["branches"]
            assert fields.pop("call_rewards") == ()
            arrays = ("response_token_ids", "behaviour_logprobs")
            for name in arrays:
                digest.update(fields.pop(name).tobytes())
            for name, values in sorted(fields.pop("columns").items()):
                digest.update(name.encode() + values.tobytes())
            fields["prompt"]["token_ids"] = fields["prompt"]["token_ids"].tolist()
            digest.update(repr(fields).encode())
    return digest.hexdigest()[:16]


def digests(tokenizer_dir: Path) -> dict[str, str]:
    """The digest of each case, by its name."""
    by_case = {}
    for name, rollout in ROLLOUTS.items():
        for kind, options in OPTIONS.items():
            setting = {**rollout, "environment": "mine:Mine"} if options else rollout
            case = test_repeats.Case(setting, **options)
            by_case[f"{name}, {kind}"] = digest_of(case.play(1).batches)
        agents = test_agents.AgentCase(rollout, renderer=make_renderer(tokenizer_dir))
        by_case[f"{name}, agents"] = digest_of(agents.play(1).batches)
    replayed = test_repeats.Case(AHEAD, {"batches": 2}, is_slow=True)
    by_case["replayed"] = digest_of(replayed.play(1).batches)
    return by_case


def test_batches_are_the_recorded_ones(tokenizer_dir: Path) -> None:
    assert digests(tokenizer_dir) == RECORDED
