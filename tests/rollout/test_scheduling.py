"""The rules of batches without engines, graders or an event loop: a test ends the episodes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.scheduling import BatchPlan, Scheduler, Selection, same_answer_share
from bapo_megatron.types import FinishReason, Prompt, RolloutStats, VersionSpan
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import likeliest_of
from tests.rollout.batching_setup import PROMPTS
from tests.rollout.calls import give
from tests.rollout.saved_files import file_of, read_file

TOKENS = 4


def selection(**rollout: Any) -> Selection:
    """Two groups of two responses per step, in two updates."""
    sizes = {"groups_per_step": 2, "samples_per_group": 2, "max_response_tokens": 20}
    config = RolloutConfig.model_validate(sizes | rollout)
    return Selection(config, ReplayConfig(), BatchPlan(seed=0, total_steps=9, updates_per_batch=2))


def scheduler(**rollout: Any) -> Scheduler:
    return Scheduler(selection(**rollout), make_stream(PROMPTS))


def completion(version: int = 0, *, is_finished: bool = True) -> Completion:
    end = FinishReason.STOP if is_finished else FinishReason.ABORT
    ids, spans = np.arange(TOKENS, dtype=np.int32), (VersionSpan(version, TOKENS),)
    return Completion(ids, np.zeros(TOKENS, np.float32), spans, end)


def sample(group: PendingGroup, version: int = 0, *, is_finished: bool = True) -> PendingGroup:
    """Give each episode of a group four tokens."""
    for episode in group.episodes:
        give(episode, completion(version, is_finished=is_finished))
    return group


@pytest.mark.parametrize(
    ("before", "now", "is_kept"),
    [(2, 2, True), (2, 0, True), (0, 0, True), (0, 2, False), (3, 2, False)],
)
def test_what_was_sampled_without_as_many_likeliest_tokens_is_sampled_again(
    before: int, now: int, is_kept: bool
) -> None:
    first, later = (replace(scheduler(), top_logprobs=k) for k in (before, now))
    first.draw(2)
    for group, is_finished in zip(first.groups, (True, False), strict=True):
        for episode in group.episodes:
            request = first.request_of(episode)
            part = completion(is_finished=is_finished)
            columns = likeliest_of(part.token_ids, request.top_logprobs)
            give(episode, replace(part, columns=columns))
    saved = read_file(file_of(first.state(RolloutStats(environment_errors={}), 0.0)))
    later.restore(saved, lambda sample: True)
    assert [e.num_tokens for g in later.groups for e in g.episodes] == [TOKENS * is_kept] * 4


def score(group: PendingGroup, *rewards: float) -> PendingGroup:
    for episode, reward in zip(group.episodes, rewards, strict=True):
        episode.finished().reward, episode.texts = reward, ("scored",)
    return group


def finished(group_id: int, *rewards: float, version: int = 0) -> PendingGroup:
    return score(sample(PendingGroup.start(group_id, PROMPTS[0], 2), version), *rewards)


def ids(groups: Sequence[PendingGroup]) -> list[int]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("rollout", "rewards", "spent_tokens", "chosen", "num_to_draw"),
    [
        ({}, [(0, 0), (0, 1), (0, 0)], 0, [0, 1], 0),
        ({}, [(0, 0)], 0, [], 1),
        ({"oversample_groups": 3}, [(0, 0), (0, 0)], 0, [0, 1], 3),
        ({"dynamic_sampling": {"enabled": True}}, [(0, 0), (0, 1), (1, 1), (1, 0)], 0, [1, 3], 0),
        ({"dynamic_sampling": {"enabled": True}}, [(0, 0), (0, 1), (1, 1)], 0, [], 1),
        (
            {"dynamic_sampling": {"enabled": True, "max_groups_ratio": 1.5}},
            [(0, 0), (0, 1), (1, 1)],
            0,
            [1, 2],
            1,
        ),
        ({"partial_tokens": 5}, [(0, 0), (0, 1)], 0, [0, 1], 0),
        ({"partial_tokens": 5}, [(0, 0)], 0, [], 2),
        ({"groups_per_step": 4, "tokens_per_step": 9}, [(0, 0)], 9, [], 0),
        ({"groups_per_step": 4, "tokens_per_step": 9}, [(0, 0), (0, 0), (1, 1)], 8, [], 0),
        ({"groups_per_step": 4, "tokens_per_step": 9}, [(0, 0), (0, 0), (1, 1)], 9, [0, 1], 0),
    ],
)
def test_which_groups_of_a_list_complete_a_batch_and_how_many_prompts_it_still_needs(
    rollout: dict[str, Any],
    rewards: list[tuple[int, int]],
    spent_tokens: int,
    chosen: list[int],
    num_to_draw: int,
) -> None:
    rules, groups = selection(**rollout), [finished(n, *pair) for n, pair in enumerate(rewards)]
    num_new = rules.config.groups_per_step
    assert ids(rules.choose(groups, num_new, spent_tokens=spent_tokens)) == chosen
    if "tokens_per_step" not in rollout:
        assert rules.num_to_draw(groups, num_new) == num_to_draw


@pytest.mark.parametrize("action", ["drop", "regenerate"])
def test_what_is_too_old_is_given_up_and_told_to_the_caller(action: str) -> None:
    rules = scheduler(oversample_groups=1, staleness={"max_age": 1, "action": action})
    rules.draw(2)
    old, unfinished, young = rules.buffer
    score(sample(old, 0), 0, 1)
    sample(unfinished, 0, is_finished=False)
    score(sample(young, 2), 0, 1)
    given_up = list(old.episodes)
    assert rules.give_up_stale(1, unfinished=True) == []
    assert rules.give_up_stale(2, unfinished=False) == given_up
    assert rules.give_up_stale(2, unfinished=True) == unfinished.episodes
    assert ids(rules.groups) == ([2] if action == "drop" else [0, 1, 2])
    assert rules.buffer.dropped == ({"stale": 2} if action == "drop" else {})
    assert [episode.num_tokens for episode in young.episodes] == [TOKENS, TOKENS]
    if action == "regenerate":
        assert not any(e.num_tokens for group in (old, unfinished) for e in group.episodes)


def test_a_batch_changes_nothing_before_it_is_taken() -> None:
    rules = scheduler(oversample_groups=2, max_carries=1, environment="mine:Mine")
    goal = rules.begin(1, version=7)
    rules.draw(goal.num_wanted)
    first, underway, second, fresh = rules.buffer
    underway.carries = 1
    for group in (first, second):
        score(sample(group), 0, 1)
    sample(underway, is_finished=False)
    taken = rules.choose(goal, generated_tokens=24)
    counters = RolloutStats(generated_tokens=24, environment_errors={"error": 2})
    formed = rules.form(goal, taken, counters, generation_s=3.0)
    assert [group.group_id for group in formed.batch.groups] == [0, 2]
    assert (formed.batch.version, formed.batch.stats.generation_s) == (7, 3.0)
    assert formed.batch.stats.dropped_groups == {"carried": 1}
    assert formed.batch.stats.unfinished_samples == 2
    assert formed.batch.stats.environment_errors == {"error": 2}
    assert ids(rules.groups) == [0, 1, 2, 3]
    assert rules.state(counters, 0.0).about.counted.generated_tokens == 24
    assert rules.take(formed) == underway.episodes
    assert rules.groups == [fresh]
    counted = rules.state(counters, 0.0).about.counted
    assert (counted.generated_tokens, counted.environment_errors) == (0, {})


def test_counters_since_the_last_batch_go_on_in_another_process() -> None:
    rules = scheduler()
    rules.draw(2)
    saved = rules.state(RolloutStats(generated_tokens=5, environment_errors={"error": 2}), 1.5)
    resumed = scheduler()
    resumed.restore(saved, lambda sample: True)
    counters = RolloutStats(generated_tokens=3, environment_errors={"error": 1, "limit": 1})
    counted = resumed.state(counters, 0.0).about.counted
    assert counted.generated_tokens == 8
    assert counted.environment_errors == {"error": 3, "limit": 1}
    assert ids(resumed.groups) == [0, 1]
    resumed.draw(3)
    assert resumed.buffer.groups[2].episodes[0].prompt == PROMPTS[2]


def test_a_fixed_lag_has_one_version_per_response() -> None:
    rules = scheduler(fixed_lag=1)
    assert (rules.begin(1, 0).num_wanted, rules.begin(1, 0).num_ahead) == (2, 2)
    rules.draw(4)
    rules.begin(2, 0)
    with pytest.raises(RolloutError, match=r"4 unfinished ones of version 0 with version 1"):
        rules.begin(2, 1)
    for group in rules.groups:
        sample(group)
    rules.begin(2, 1)
    rules.buffer.take(rules.groups[1:])
    with pytest.raises(RolloutError, match="groups of step 2 must have been sampled 1 steps"):
        rules.begin(2, 1)


@pytest.mark.parametrize(
    ("solved", "share"),
    [([], 0.0), (["proof"], 0.0), (["proof"] * 4 + ["5"], 0.75), (["1", "2", "3"], 0.0)],
)
def test_the_share_of_solved_prompts_with_one_answer_counts_each_prompt_once(
    solved: list[str], share: float
) -> None:
    def group(answer: str, *rewards: float) -> PendingGroup:
        prompt = Prompt("p:0", (1,), answer, "")
        return score(sample(PendingGroup.start(0, prompt, len(rewards))), *rewards)

    groups = [group(answer, 0.0, 1.0, 1.0) for answer in solved] + [group("9", 0.0)] * 3
    assert same_answer_share(groups) == share
