"""The records that cross package borders.

The life of a token: ``Prompt`` → ``Sample`` (one response) → ``Group`` (G responses to one prompt)
→ ``RolloutBatch`` (all groups of a step) → ``EncodedBatch`` (its bytes, for every rank) →
``MicroBatch`` (packed tensors of one forward pass) → ``UpdateResult`` (one optimizer update) →
``StepMetrics`` (what the run reports).

An episode is a tree of calls to the policy. Each of its leaves is a sequence that trains: the first
is the ``Sample``, the others are its ``branches``.

Text stays with the collector: ranks get token ids (``Sample``, ``PromptTokens``), people get
``SampleText``.

Shape legend: P = prompt tokens, R = response tokens, Q = response tokens that the policy sampled
(all, unless an environment wrote some), N = packed tokens of a micro-batch (prompts, responses and
padding), T = tokens of a micro-batch that the policy sampled, S = sequences of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from bapo_megatron.runtime.names import SHAPING_TERMS

if TYPE_CHECKING:
    import torch


Count = Annotated[int, Field(ge=0, le=2**53)]
"""A counter; small enough for a float to hold it exactly."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The end-of-sequence token was sampled (it is the last response token), and the environment
    wants no further turn."""
    STOP_STRING = "stop_string"
    """A stop string of the call was sampled; no end-of-sequence token follows it. Of calls only."""
    LENGTH = "length"
    """The response, or what an environment wrote, reached ``max_response_tokens``."""
    TURNS = "turns"
    """The environment wants a turn beyond ``episodes.max_turns``."""
    ENVIRONMENT = "environment"
    """The environment failed, and ``episodes.on_error`` lets the run go on."""
    ABORT = "abort"
    """The request was aborted; the sample is unfinished and can be resumed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered prompt, ready for the engine and the graders; it stays with the collector."""

    prompt_id: str
    """``<file name or Hub id>:<row>``, unique within a data set and stable between runs."""
    token_ids: tuple[int, ...]
    """The rendered chat template, tokenised once; never re-tokenised later."""
    answer: str
    """The reference answer that the reward compares with."""
    text: str
    """The rendered prompt as text, for dumps and for people."""
    source: str = ""
    """Name of the data set that it comes from."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row, as JSON values, for reward functions."""

    def tokens(self) -> PromptTokens:
        """Return the part that ranks get."""
        return PromptTokens(self.prompt_id, np.array(self.token_ids, np.int32), self.source)


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """What training needs of a prompt; the samples of a group share one."""

    prompt_id: str
    """As in ``Prompt``, for messages."""
    token_ids: np.ndarray
    """[P] int32."""
    source: str = ""
    """Name of the data set that it comes from, for metrics."""


class VersionSpan(NamedTuple):
    """Consecutive response tokens that one weights version sampled."""

    version: int
    num_tokens: int
    """At least 1."""


VersionSpans = tuple[VersionSpan, ...]
"""The weights versions of a whole response: versions ascend, token counts add up to Q."""


class WrittenSpan(NamedTuple):
    """Consecutive response tokens that an environment wrote, between two turns of the policy."""

    start: int
    """Position of the first in the response; at least 1."""
    num_tokens: int
    """At least 1."""


@dataclass(slots=True)
class Sample:
    """One response to a prompt: an episode of one turn or of several.

    All fields but ``branches`` describe one sequence. A branch's prompt is what it shares with
    earlier sequences of the episode, or was rendered anew; its response is what is new from there
    on. So every sampled token is in one response and trains once. A branch has no reward.
    """

    group_id: int
    """Number of the group, counted from 0 over the whole run."""
    index: int
    """Position in the group, 0 … G − 1."""
    prompt: PromptTokens
    response_token_ids: np.ndarray
    """[R] int32, exactly as the engine sampled and the environment wrote them."""
    behaviour_logprobs: np.ndarray
    """[Q] float32, log π_rollout of each sampled token by the weights that sampled it."""
    versions: VersionSpans
    """The weights version of each of the Q tokens."""
    finish_reason: FinishReason
    written: tuple[WrittenSpan, ...] = ()
    """What an environment wrote: ascending, never adjacent. Between them are the policy's turns."""
    reward: float = 0.0
    """Reward of the finished response, shaping included."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Unweighted reward of each function, shaping terms, and metrics of functions
    (``<function>/<metric>``)."""
    answer_found: bool = False
    """Whether an answer could be extracted from the response, right or wrong."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Token columns by name, [Q] or [Q, K] (``data.token_columns``)."""
    routes: np.ndarray | None = None
    """[≤ P + R, layers · experts per token] int8 or int16: the experts that the engine chose for
    the first tokens of prompt and response, layer by layer; −1 where they are not known. None
    unless asked for; dumps have them in a file of their own (``data.routes``)."""
    call_rewards: tuple[float, ...] = ()
    """What an agent gave each turn of the policy; empty where it gave none."""
    number: int = 0
    """Position of the sequence in its episode; 0 unless it is a branch."""
    branches: tuple[Sample, ...] = ()
    """The episode's further sequences, 1, 2, …, with the same group_id and index."""

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """All sequences of the episode, this one first."""
        return (self, *self.branches)

    @property
    def episode_sampled(self) -> int:
        """Q of the whole episode."""
        return sum(sequence.num_sampled for sequence in self.sequences)

    @property
    def episode_tokens(self) -> int:
        """R of the whole episode."""
        return sum(len(sequence.response_token_ids) for sequence in self.sequences)

    @property
    def episode_turns(self) -> int:
        """Turns of the policy of the whole episode."""
        return sum(sequence.num_turns for sequence in self.sequences)

    @property
    def episode_versions(self) -> VersionSpans:
        """The spans of all sequences, which need not ascend from one to the next."""
        return tuple(span for sequence in self.sequences for span in sequence.versions)

    @property
    def place(self) -> str:
        """Its name in messages."""
        name = f"sample {self.index} of group {self.group_id}"
        return f"{name}, sequence {self.number}" if self.number else name

    @property
    def loss_mask(self) -> np.ndarray:
        """[R] bool: the Q tokens that the policy sampled; no others are trained on."""
        mask_R = np.ones(len(self.response_token_ids), dtype=bool)
        for start, num_tokens in self.written:
            mask_R[start : start + num_tokens] = False
        return mask_R

    @property
    def sampled_token_ids(self) -> np.ndarray:
        """[Q] int32."""
        return self.response_token_ids[self.loss_mask] if self.written else self.response_token_ids

    @property
    def sequence_tokens(self) -> int:
        """P + R."""
        return len(self.prompt.token_ids) + len(self.response_token_ids)

    @property
    def num_written(self) -> int:
        """R − Q."""
        return sum(span.num_tokens for span in self.written)

    @property
    def num_sampled(self) -> int:
        """Q."""
        return len(self.response_token_ids) - self.num_written

    @property
    def num_turns(self) -> int:
        """Turns of the policy, the current one included."""
        return 1 + len(self.written)

    @property
    def is_right(self) -> bool:
        """Whether the response is correct, before shaping."""
        shaping = math.fsum(self.reward_components.get(term, 0.0) for term in SHAPING_TERMS)
        return self.reward - shaping >= 1.0 - 1e-9  # up to rounding

    def segments(self) -> list[np.ndarray]:
        """Split the tokens into the policy's first turn, what was written after it, and so on."""
        edges = [edge for start, n in self.written for edge in (start, start + n)]
        return np.split(self.response_token_ids, edges)


@dataclass(frozen=True, slots=True)
class SampleText:
    """The text of a sample, for people; written beside the dump, never sent to a rank."""

    group_id: int
    index: int
    prompt_text: str
    """The rendered prompt."""
    answer: str
    """The reference answer."""
    response_text: str
    """The policy's last turn, decoded without special tokens: what was graded."""
    turns: tuple[str, ...] = ()
    """Texts of policy and environment in turn; empty for a single turn."""
    extracted: str = ""
    """The answer that the first reward function extracted; empty if it reports none."""
    reason: str = ""
    """Why that function judged it right or wrong, in a word; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class Group:
    """The G finished responses to one prompt."""

    group_id: int
    samples: tuple[Sample, ...]


AGENT_COUNTS = (
    *("agent_calls", "agent_forks", "agent_divergences", "agent_refusals"),
    "agent_untrained_calls",
)
"""Names of what agents add to ``RolloutStats.environment_counts``."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What the generation of one batch cost."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    """For ``calls.decode_json``: an unknown counter comes from another version."""
    generated_tokens: Count = 0
    """Tokens received from the engines while this batch was collected, kept or not."""
    generation_s: float = 0.0
    """Wall time from the first request to the last complete group, in seconds."""
    resumed_samples: Count = 0
    """Requests that resumed a response; one response may need several."""
    unfinished_samples: Count = 0
    """Samples left unfinished in the buffer when the batch was complete."""
    reward_timeouts: Count = 0
    """Answers scored 0 because grading them took too long."""
    reward_errors: Count = 0
    """Answers scored 0 because a reward function failed on them (``reward.on_error: zero``)."""
    environment_errors: dict[str, Count] | None = None
    """Episodes that ended since the previous batch because their environment failed, by kind
    (``EnvironmentFailedError.kind``); None without an environment."""
    environment_counts: dict[str, float] = field(default_factory=dict)
    """Sums of the environment's ``Step.counts`` since the previous batch."""
    same_answer_share: float = 0.0
    """(m − 1) / (s − 1) of the s groups with a right response, m of which have the most common
    reference answer of these; 0 where s < 2."""
    replayed_groups: Count = 0
    """Groups of the batch that were in an earlier batch."""
    equal_reward_groups: Count = 0
    """Finished groups left out because all their rewards were equal (dynamic sampling)."""
    filled_groups: Count = 0
    """Such groups that fill the batch because its limit was reached."""
    dropped_groups: dict[str, Count] = field(default_factory=dict)
    """Dropped since the last batch: ``equal_rewards``, ``stale``, ``carried`` or ``surplus``."""
    regenerated_samples: Count = 0
    """Responses restarted since the previous batch because they were too old."""
    lost_requests: Count = 0
    """Requests continued elsewhere since the previous batch because their server failed, the
    teacher's included; those during evaluations do not count."""
    retractions: Count = 0
    """Requests preempted since the previous batch by a full KV cache, not by a weight sync."""
    engine_load: dict[str, float] = field(default_factory=dict)
    """Mean and maximum of each ``engine.base.LoadReport`` field since the previous batch, over
    engines with requests; engines that are ``usable`` and that are ``known`` now."""
    loop_lag_s: float = 0.0
    """Largest delay of the collector's event loop since the previous batch, in seconds."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All groups of one training step: new ones by ``group_id``, replayed ones among them."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Weights version the engines held while the batch was collected."""
    groups: tuple[Group, ...]
    stats: RolloutStats = field(default_factory=RolloutStats)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group after group."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def sequences(self) -> list[Sample]:
        """The sequences of all samples, sample after sample."""
        return [sequence for sample in self.samples for sequence in sample.sequences]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """A batch as the collector wrote it, in the bytes that ranks get (``data.dump``)."""

    name: str
    """Where it comes from, for messages."""
    content: bytearray
    """A parquet file."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed sequences of one forward pass on one data-parallel rank.

    Row ``rows_T[t]`` of the logits [N, V] is the distribution from which sampled token ``t`` was
    drawn: the position *before* the token. Environment tokens are among the N tokens only: they
    have no loss, no gradient and no weight.
    """

    token_ids_N: torch.Tensor
    """[N] int64: prompt + response of each sequence in turn, then padding."""
    position_ids_N: torch.Tensor
    """[N] int64: 0, 1, … within each sequence."""
    cu_seqlens: torch.Tensor
    """[S + 1] int32: offsets of the sequences; the padding, if any, is a sequence of its own."""
    rows_T: torch.Tensor
    """[T] int64: row of the logits that predicts each sampled token."""
    target_T: torch.Tensor
    """[T] int64: the sampled token's id."""
    behaviour_logprob_T: torch.Tensor
    """[T] float32: μ, the engine's, or the trainer's with ``behaviour: recomputed``."""
    rollout_logprob_T: torch.Tensor
    """[T] float32: log π_rollout, always the engine's."""
    advantage_T: torch.Tensor
    """[T] float32: A."""
    reward_T: torch.Tensor
    """[T] float32: reward of the token's response."""
    mask_T: torch.Tensor
    """[T] float32: m, 1 for tokens that train, else 0."""
    importance_T: torch.Tensor
    """[T] float32: π_recomputed / π_rollout of the token, or of its whole response (product or
    geometric mean), where ``algorithm.correction`` asks for it; else 1."""
    loss_weight_T: torch.Tensor
    """[T] float32: m over the global denominator of the update. Σ ``loss_weight · loss`` over all
    ranks and micro-batches is the loss of the update."""
    sample_T: torch.Tensor
    """[T] int64: index of the token's sample in the step's batch."""
    response_tokens_T: torch.Tensor
    """[T] float32: Σm over the token's whole response, across sequences and ranks."""
    position_T: torch.Tensor
    """[T] int64: position of the token in its response, whose sequences count as one."""
    version_T: torch.Tensor
    """[T] int64: weights version that sampled the token."""
    entropy_T: torch.Tensor | None = None
    """[T] float32: H from the collection pass, where there was one."""
    response_sum_T: torch.Tensor | None = None
    """[T] float64: what the objective sums over each response, where it asks for it."""
    selected_T: torch.Tensor | None = None
    """[T] bool: tokens that the objective keeps, where it leaves some out."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Token columns by name, [T] or [T, K] (``data.token_columns``)."""
    routes: torch.Tensor | None = None
    """[N or, under sequence parallelism, this rank's part of it, layers of this rank with experts,
    experts per token] int8 or int16: the experts to use; −1: those that the router chooses."""

    @property
    def num_tokens(self) -> int:
        """N, padding included."""
        return int(self.token_ids_N.numel())


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One optimizer update, reduced over all ranks (equal on every rank)."""

    sums: dict[str, float]
    """Global sums and counts by name; ratios are formed once, at the end of the step."""
    maxima: dict[str, float] = field(default_factory=dict)
    """Maxima by metric name."""
    decisions: tuple[dict[str, float], ...] = ()
    """Metrics of each decision of the objective: one per update, or one per micro-batch."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping; 0 where the update was skipped."""
    skipped: bool = False
    """No optimizer step: no token had a gradient, or ``on_nonfinite: skip_update`` applied."""


@dataclass(frozen=True, slots=True)
class EvalScore:
    """One score of a set, the mean over its problems (docs/evaluation.md)."""

    name: str
    """``avg@n``, ``pass@k`` or ``maj@k``."""
    value: float
    low: float
    """Low end of the 95 % interval over problems."""
    high: float
    """High end."""


@dataclass(frozen=True, slots=True)
class EvalProblem:
    """The data behind the scores of one problem."""

    prompt_id: str
    answer: str
    """The reference answer."""
    rewards: tuple[float, ...]
    """[n]."""
    votes: tuple[int, ...]
    """[n]: cluster of equal answers that each sample belongs to, from 0; -1 without an answer, -2
    with one that the reward function did not report."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores of one evaluation set, and their cost."""

    name: str
    num_prompts: int
    samples_per_prompt: int
    """n."""
    answer_found_share: float
    """Share of samples from which an answer could be extracted, right or wrong."""
    response_tokens_mean: float
    response_tokens_median: float
    response_tokens_p95: float
    truncated_share: float
    missing_answers: int
    """Samples from which no answer could be extracted."""
    grading_timeouts: int
    """Samples whose grading exceeded its time or memory limit; their reward is 0."""
    comparison_timeouts: int
    """Comparisons of two answers that exceeded a limit; they count as different."""
    generated_tokens: int
    wall_s: float
    """From the start of the evaluation (of all sets) to this set's last sample, including earlier
    attempts of a resumed one."""
    tokens_per_s: float
    """``generated_tokens`` over ``wall_s``."""
    version: int
    """Weights version that was evaluated."""
    settings: Mapping[str, Any]
    """How the samples were generated (``evaluation.samples``); empty if unknown."""
    scores: tuple[EvalScore, ...]
    """Every score with its interval; avg@n comes first."""
    problems: tuple[EvalProblem, ...]
    environment_errors: int = 0
    """Episodes whose environment failed; their reward is 0."""
    grading_errors: int = 0
    """Samples scored 0 because a reward function failed (``reward.on_error: zero``)."""
    reward_means: Mapping[str, float] = field(default_factory=dict)
    """Mean reward of each function, if there are several, and of every metric, over the samples
    that have it."""

    @property
    def avg_at_k(self) -> float:
        """Mean over prompts of the mean reward of their n samples."""
        return self.scores[0].value

    @property
    def has_votes(self) -> bool:
        """Whether the reward reports its answers, so that maj@k and answer counts are known."""
        return any(score.name.startswith("maj@") for score in self.scores)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step; their names are a stable interface (docs/metrics.md)."""

    step: int
    """Number of the step, from 1; 0 before training."""
    values: dict[str, float]
