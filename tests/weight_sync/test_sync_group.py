"""Who takes part in a weight sync, and who is blamed, without servers or an event loop."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.engine.base import Capabilities, GroupPlace
from bapo_megatron.engine.pooled import EngineState, PooledEngine
from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.weight_sync.receive import SyncGroup

GONE, REFUSED, BROKEN = ServerGoneError("gone"), RolloutError("refused"), TypeError("names")


def group_of(*num_ranks: int) -> tuple[SyncGroup, list[PooledEngine]]:
    """A group whose members have joined, with so many ranks each."""
    engines: list[Any] = [SimpleNamespace(address=f"s{n}") for n in range(len(num_ranks))]
    entries = [
        PooledEngine(engine, EngineState.USABLE, properties=Capabilities(ranks, frozenset()))
        for engine, ranks in zip(engines, num_ranks, strict=True)
    ]
    group = SyncGroup(members=tuple(entries))
    group.join(GroupPlace("group", "127.0.0.1", 1, "gloo", 0, 1 + sum(num_ranks)))
    return group, entries


def test_ranks_follow_rank_0_in_the_order_of_the_members() -> None:
    group, entries = group_of(2, 1, 4)
    places = group.join(GroupPlace("group", "127.0.0.1", 1, "gloo", 0, 8))
    assert [places[entry].first_rank for entry in entries] == [1, 3, 4]
    assert group.opened().num_ranks == (2, 1, 4)


@pytest.mark.parametrize(
    ("errors", "early", "is_shared", "lost"),
    [
        ([None, GONE, REFUSED], [2], False, {1: "gone"}),
        ([None, BROKEN, REFUSED], [2], False, {1: "s1: a call failed (names)"}),
        ([None, REFUSED, REFUSED], [1], False, {1: "refused"}),
        ([None, REFUSED, REFUSED], [1, 2], True, {}),
        ([REFUSED, REFUSED, REFUSED], [2], False, {2: "refused"}),
    ],
)
def test_a_refusal_is_blamed_only_if_nothing_else_explains_the_failure(
    errors: Sequence[Exception | None], early: list[int], is_shared: bool, lost: dict[int, str]
) -> None:
    group, entries = group_of(1, 1, 1)
    group.is_shared = is_shared
    blamed = group.blame(
        dict(zip(entries, errors, strict=True)), [entries[number] for number in early]
    )
    assert blamed == {entries[number]: reason for number, reason in lost.items()}
    assert not group.is_intact
    assert group.eligible(entries) == [e for n, e in enumerate(entries) if n not in lost]


def test_nobody_is_blamed_beside_a_lost_member_which_comes_back_if_it_is_the_only_one() -> None:
    group, (first, second) = group_of(1, 1)
    first.state = EngineState.LOST
    assert group.blame({first: None, second: REFUSED}, [second]) == {}
    first.state = EngineState.STALE
    assert group.eligible([first, second]) == [second]
    second.state = EngineState.LOST
    assert group.eligible([first, second]) == [first]


def test_only_members_that_joined_and_are_not_lost_leave() -> None:
    group, entries = group_of(1, 2, 3)
    entries[0].state = EngineState.LOST
    group.members = tuple(entries[:2])
    assert group.leave() == ("group", [entries[1]])
    assert group.leave() == ("", [])
