"""Scorers: what a step computes for its tokens before its updates.

    behaviour: μ by the trainer, with importance weights       (``algorithm.behaviour``)
    reference: log-probs by the reference of a KL divergence   (``algorithm.kl``)
    teacher:   log-probs, and hidden states, by a teacher      (``algorithm.distillation``)

A scorer fills token columns (``data.token_columns``) of the micro-batches on the last pipeline
stage. They are packed as for the loss, so a reference with the policy's weights gives the policy's
log-probs bit for bit. Columns that a dump has filled are not computed again.

Shape legend: T = response tokens of a micro-batch, B = samples of the batch, Q = tokens of a sample
that the policy sampled, R = all its response tokens, H = hidden size.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.algorithm.kl import estimate_kl
from bapo_megatron.algorithm.loss import RESPONSE_UNIT, sum_over_responses
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.schema import AlgorithmConfig, RunConfig
from bapo_megatron.config.scorers import REFERENCE_KEY, TEACHER_KEY, FrozenModelConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.data.token_columns import (
    COLUMNS,
    REFERENCE,
    SAMPLER_TOP_IDS,
    SAMPLER_TOP_LOGPROBS,
    TEACHER,
    TEACHER_HIDDEN,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
)
from bapo_megatron.ops.chunked import OutputHead
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.frozen import FrozenModel
from bapo_megatron.policy.model import Model, PolicyOutput
from bapo_megatron.policy.weight_table import sequence_flops
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    broadcast_from_last_stage,
    fail_together,
    reduce_over,
)
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.split import SplitUpdate
from bapo_megatron.types import MicroBatch, RolloutBatch

Splits = tuple[SplitUpdate, ...]


class Scorer(Protocol):
    """Computes something for the tokens of a step before its updates."""

    @property
    def name(self) -> str:
        """For hang reports."""

    def score(self, splits: Splits, batch: RolloutBatch) -> Splits:
        """Return the step's updates with what was computed; a collective of all ranks."""


@dataclass(frozen=True, slots=True)
class BehaviourScorer:
    """Replaces μ by the log-probs of the policy at the start of the step.

    With ``router_replay: behaviour`` it also records the experts that its pass used.
    """

    model: Model
    output: PolicyOutput
    config: AlgorithmConfig
    name: str = "behaviour"

    def score(self, splits: Splits, batch: RolloutBatch) -> Splits:
        """See ``Scorer``; the first update also gets ℓ and H: the pass ran with its weights."""
        scored = []
        for number, split in enumerate(splits):
            policy, split = self._forward(split)
            if policy:
                micro_batches = with_recomputed_behaviour(
                    split.micro_batches,
                    [logprob_T for logprob_T, _ in policy],
                    self.config.correction,
                    num_samples=len(batch.samples),
                    data_group=self.model.groups.data,
                )
                split = replace(split, micro_batches=micro_batches)
            flops = split.scored_flops + split.counts.get("forward_flops", 0.0)
            first = policy if number == 0 else None
            scored.append(replace(split, scored_flops=flops, policy=first))
        return tuple(scored)

    def _forward(self, split: SplitUpdate) -> tuple[list[TokenLogprobs], SplitUpdate]:
        routers, micro_batches = self.model.routers, split.micro_batches
        if routers is None or self.config.router_replay != "behaviour":
            return self.model.forward_only(micro_batches, self.output.read), split
        with routers.recorded() as recorded:
            policy = self.model.forward_only(micro_batches, self.output.read)
        if not recorded:  # no micro-batches, or no layers with experts on this rank
            return policy, split
        pairs = zip(micro_batches, recorded, strict=True)
        return policy, replace(
            split, micro_batches=tuple(replace(mb, routes=routes) for mb, routes in pairs)
        )


@dataclass(eq=False)
class FrozenScorer:
    """Fills a column with the log-probs of a frozen model, which is built on first use."""

    name: str
    """Of the token column."""
    build: Callable[[], FrozenModel]
    """A collective of all ranks."""
    output_of: Callable[[Model], PolicyOutput]
    keeps_hidden: bool = False
    """Whether to keep the inputs of its head, too, as ``TEACHER_HIDDEN``."""
    add_to_dump: Callable[[str, Splits, RolloutBatch], None] | None = None
    """Called with its name and every step's updates and batch, for replays."""
    _frozen: FrozenModel | None = field(default=None, init=False)
    _newest: Path | None = field(default=None, init=False)
    """Weights that the model gets when it is needed next."""

    @property
    def frozen(self) -> FrozenModel:
        """The model, with the newest weights; a collective of all ranks.

        Raises:
            ValueError: The directory of the newest weights has other tensors.
        """
        if self._frozen is None:
            self._frozen = self.build()
        if self._newest is not None:
            self._frozen.load(self._newest)
            self._newest = None
        return self._frozen

    def load(self, directory: Path) -> None:
        """Replace the weights, at once if the model is built; see ``frozen``."""
        self._newest = directory
        if self._frozen is not None:
            _ = self.frozen

    @property
    def head(self) -> OutputHead | None:
        """The head that ``TEACHER_HIDDEN`` is for, on the last stage; None without it."""
        return self.frozen.model.head if self.keeps_hidden else None

    def score(self, splits: Splits, batch: RolloutBatch) -> Splits:
        """See ``Scorer``."""
        is_filled = _is_filled(self.name, splits, batch)
        if is_filled and not self.keeps_hidden:
            return splits
        lengths = [sequence.sequence_tokens for sequence in batch.sequences]
        scored = []
        with self.frozen.on_device() as model:
            read = partial(self._read, self.output_of(model))
            for split in splits:
                columns = model.forward_only(split.micro_batches, read)
                # No columns on any stage but the last.
                micro_batches = tuple(
                    replace(micro_batch, columns={**micro_batch.columns, **values})
                    for micro_batch, values in zip(split.micro_batches, columns, strict=False)
                )
                flops = sum(sequence_flops(model.hf).of(lengths[i]) for i in split.computed)
                split = replace(split, scored_flops=split.scored_flops + flops)
                scored.append(replace(split, micro_batches=micro_batches or split.micro_batches))
        if self.add_to_dump is not None and not is_filled:
            self.add_to_dump(self.name, tuple(scored), batch)
        return tuple(scored)

    def _read(
        self, reader: PolicyOutput, output: Tensor, micro_batch: MicroBatch
    ) -> dict[str, Tensor]:
        logprob_T, _ = reader.read(output, micro_batch)
        if not self.keeps_hidden:
            return {self.name: logprob_T}
        head = reader.head
        assert head is not None, "ops.logits_chunk_tokens"
        hidden_TH = head.gather_rows(output).index_select(0, micro_batch.rows_T)
        return {self.name: logprob_T, TEACHER_HIDDEN: hidden_TH}


@dataclass(frozen=True, slots=True)
class GivenColumns:
    """Requires columns that the collector's engines have filled."""

    columns: tuple[str, ...]
    """What the loss needs, of one section."""
    top_k: int
    """Width of the wide ones."""
    name: str = "engines' columns"

    def score(self, splits: Splits, batch: RolloutBatch) -> Splits:
        """See ``Scorer``.

        Raises:
            ValueError: A response lacks them, or has another number of likeliest tokens, in a
                replay of another run or from an engine of the user's; on all ranks.
        """
        for column in self.columns:
            section = COLUMNS[column].filled_by
            if not _is_filled(column, splits, batch):
                raise ValueError(
                    f"step {batch.step}: the batch has no {column} of each response; use an engine "
                    f"that returns it, replay dumps of a run with this {section}, or turn that off"
                )
            widths = {
                sequence.columns[column].shape[1]
                for sequence in batch.sequences
                if COLUMNS[column].is_wide and sequence.num_sampled
            }
            if widths - {self.top_k}:
                raise ValueError(
                    f"step {batch.step}: {column} has {min(widths - {self.top_k})} likeliest "
                    f"tokens, got {section}.top_k = {self.top_k}; set it to that of the run that "
                    "wrote the dumps"
                )
        return splits


def _is_filled(column: str, splits: Splits, batch: RolloutBatch) -> bool:
    """Whether all sampled tokens have a column, and those that are computed have values in it.

    A run that computed fewer of them has left NaN in its dumps.
    """
    sequences = batch.sequences
    if not all(column in s.columns for s in sequences if s.num_sampled):
        return False
    computed = (sequences[index] for split in splits for index in split.computed)
    return all(
        sequence.columns[column].size > 0 and not np.isnan(sequence.columns[column]).all()
        for sequence in computed
    )


def frozen_scorers(config: RunConfig, policy: Model) -> tuple[Scorer, ...]:
    """Return the scorers with models in the trainer that the configuration asks for.

    Also what requires the columns that engines fill. Models are built at once; in a
    replay, whose dumps may have their columns, when needed.
    """
    groups, distillation = policy.groups, config.algorithm.distillation
    is_replay = config.replay.dumps is not None
    add_to_dump = partial(add_column_to_dump, config.run_dir / "rollouts", groups)
    scorers: list[FrozenScorer] = []
    for key, model in config.algorithm.frozen_models.items():
        keeps_hidden = key == TEACHER_KEY and distillation.is_over_vocabulary
        build = partial(_build_frozen, model, config, groups, keeps_head=keeps_hidden)
        if key == REFERENCE_KEY and config.reference_is_base:
            build = partial(FrozenModel, policy)
        scorer = FrozenScorer(
            {REFERENCE_KEY: REFERENCE, TEACHER_KEY: TEACHER}[key],
            build,
            lambda built: PolicyOutput.of(built, config.ops, config.train_temperature),
            keeps_hidden=keeps_hidden,
            add_to_dump=add_to_dump if config.rollout.dump and not is_replay else None,
        )
        scorers.append(scorer)
    for built in () if is_replay else scorers:
        _ = built.frozen
    given: list[GivenColumns] = []
    if distillation.has_engine:
        has_top = distillation.loss == "top_k"
        columns = (TEACHER, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)[: 3 if has_top else 1]
        given.append(GivenColumns(columns, distillation.top_k))
    if top_k := config.algorithm.centering.top_k:
        given.append(GivenColumns((SAMPLER_TOP_IDS, SAMPLER_TOP_LOGPROBS), top_k))
    return (*scorers, *given)


def _build_frozen(
    frozen: FrozenModelConfig, config: RunConfig, groups: ProcessGroups, *, keeps_head: bool
) -> FrozenModel:
    changes = {"path": frozen.path or config.model.path, "lora": LoraConfig()}
    model = Model.build(
        config.model.model_copy(update=changes),
        config.parallel,
        config.megatron,
        groups,
        returns_hidden_states=config.ops.logits_chunk_tokens > 0,
    )
    return FrozenModel.freeze(model, on_host=frozen.memory == "host", keeps_head=keeps_head)


def reference_updater(
    config: RunConfig, policy: Model, scorers: Iterable[Scorer]
) -> "ReferenceUpdater | None":
    """Return what makes the policy the reference; None if the reference never changes."""
    every_steps, run_dir = config.algorithm.kl.reference.update_every, config.run_dir
    frozen = (scorer for scorer in scorers if isinstance(scorer, FrozenScorer))
    reference = next((scorer for scorer in frozen if scorer.name == REFERENCE), None)
    if reference is None or every_steps == 0:
        return None
    return ReferenceUpdater(
        policy, reference, run_dir / "reference", every_steps, run_dir / "checkpoints"
    )


def sum_kl(
    splits: Iterable[SplitUpdate], kind: str, num_samples: int, groups: ProcessGroups
) -> Tensor:
    """Return Σ KL over each response, estimated at ℓ = μ: [B] float64, exact, equal on all ranks.

    A collective of all ranks. Tokens that do not train do not count. ``splits`` have the
    reference's column; ``kind`` is that of ``estimate_kl``.
    """

    def estimate(host_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        mb = on_device(host_batch, groups.device)
        value_T = estimate_kl(kind, mb.behaviour_logprob_T, mb.columns[REFERENCE]).value_T
        counts_T = (mb.mask_T > 0) & value_T.isfinite()
        return torch.where(counts_T, value_T, 0.0), mb.sample_T

    # Before the last stage, micro-batches have no columns.
    scored = [mb for split in splits for mb in split.micro_batches] if groups.is_last_stage else []
    sum_B = sum_over_responses(map(estimate, scored), num_samples, groups.device)
    if groups.is_last_stage:
        reduce_over(groups.data, sum_B)
    broadcast_from_last_stage(sum_B, groups)
    return sum_B.double() * RESPONSE_UNIT


def with_teacher_advantages(splits: Splits, coefficient: float, groups: ProcessGroups) -> Splits:
    """Add coefficient · (ℓ_teacher − μ) to the advantage of every token, on the last stage."""
    if not groups.is_last_stage:
        return splits

    def add_teacher(host_batch: MicroBatch) -> MicroBatch:
        mb = on_device(host_batch, groups.device)
        log_ratio_T = mb.columns[TEACHER] - mb.behaviour_logprob_T
        return replace(mb, advantage_T=mb.advantage_T + coefficient * log_ratio_T)

    return tuple(
        replace(split, micro_batches=tuple(map(add_teacher, split.micro_batches)))
        for split in splits
    )


def add_column_to_dump(
    directory: Path, groups: ProcessGroups, name: str, splits: Splits, batch: RolloutBatch
) -> None:
    """Rewrite a step's dump with a column that the trainer computed, for replays.

    A collective of all ranks. ``directory`` has the run's dumps.

    Raises:
        OSError: The file cannot be written; raised on every rank.
    """
    from bapo_megatron.data.dump import dump_path, write_batch  # pyarrow

    starts = [0, *accumulate(sample.episode_tokens for sample in batch.samples)]
    # The responses of all samples, one after the other.
    values = torch.zeros(starts[-1], dtype=torch.float32, device=groups.device)
    if groups.is_last_stage:
        start_B = torch.tensor(starts[:-1], device=values.device)
        for host_batch in (mb for split in splits for mb in split.micro_batches):
            mb = on_device(host_batch, values.device)
            values[start_B[mb.sample_T] + mb.position_T] = mb.columns[name]
        reduce_over(groups.data, values)  # one rank has a token, the others have 0
    broadcast_from_last_stage(values, groups)
    with fail_together(groups):
        if groups.rank == 0:
            computed = {index for split in splits for index in split.computed}
            sequences = batch.sequences
            ends = np.cumsum([len(sequence.response_token_ids) for sequence in sequences])
            parts = np.split(values.cpu().numpy(), ends[:-1])
            for index, (sequence, values_R) in enumerate(zip(sequences, parts, strict=True)):
                if index not in computed:
                    values_R = np.full_like(values_R, COLUMNS[name].default)
                sequence.columns = {**sequence.columns, name: values_R[sequence.loss_mask]}
            write_batch(dump_path(directory, batch.step), batch)


@dataclass(frozen=True, slots=True)
class ReferenceUpdater:
    """Makes the policy the reference every N steps (``algorithm.kl.reference.update_every``).

    The weights go through the run directory, so a resumed run has the same reference in any layout.
    """

    policy: Model
    reference: FrozenScorer
    directory: Path
    """Where references are kept, one per update."""
    every_steps: int
    checkpoints: Path
    """The run's; references that none of them needs are removed."""

    def after_step(self, step: int) -> None:
        """Export the policy and load it into the reference, if due; a collective of all ranks.

        Raises:
            OSError: The directory cannot be written; raised on every rank.
        """
        if step % self.every_steps:
            return
        self.policy.export_hf(self._path(step))
        self.reference.load(self._path(step))
        with fail_together(self.policy.groups):
            if self.policy.groups.rank == 0:
                self._remove_old(step)

    def restore(self, step: int) -> None:
        """Load the reference that the run had after ``step``; a collective of all ranks.

        Raises:
            ValueError: It is missing.
        """
        due = step - step % self.every_steps
        if due == 0:
            return
        if not self._path(due).is_dir():
            raise ValueError(
                f"{self._path(due)}: missing, the reference of the steps after {due}; restore it "
                "from a copy, or resume from a checkpoint before it"
            )
        self.reference.load(self._path(due))

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _remove_old(self, step: int) -> None:
        """Remove references that no checkpoint needs, be it complete or still written."""
        from bapo_megatron.policy import checkpoint_files as files  # xxhash

        steps = files.find_steps(self.checkpoints), files.find_unfinished_steps(self.checkpoints)
        oldest = min(chain(*steps), default=step)
        first = self._path(oldest - oldest % self.every_steps)
        for path in self.directory.glob("step_" + 6 * "[0-9]"):
            if path.name < first.name:
                shutil.rmtree(path)
