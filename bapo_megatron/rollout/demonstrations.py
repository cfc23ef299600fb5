"""Demonstrations as a source of batches: rendered once into files, then read in any order.

The files are mapped into memory, so that sets may be larger than that. A step's demonstrations
follow from the seed and its number alone. Shape legend: L = tokens of a demonstration.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import batched
from typing import Any

import numpy as np
import pyarrow as pa

from bapo_megatron.config.demonstrations import DemonstrationSetConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.demonstrations import (
    DemonstrationRenderer,
    DemonstrationReport,
    read_demonstrations,
)
from bapo_megatron.data.dump import encode_batch
from bapo_megatron.data.rows import DataError
from bapo_megatron.rollout.client import ReplaySource
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry.console import say
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    Sample,
    VersionSpan,
    WrittenSpan,
)

_TYPES = {"key": pa.string(), "source": pa.string(), "weight": pa.float64()}
_TYPES["tokens"] = pa.list_(pa.int32())
"""Columns of the files; ``tokens`` [L] has the ids of trained tokens, and ~id of the others."""
_BATCH_ROWS = 1024
"""Rows that are held in memory at a time, besides a step's."""


class DemonstrationSource(ReplaySource):
    """The demonstrations of a run, alone or beside its other source."""

    def __init__(self, config: RunConfig, on_progress: Callable[[str], None]) -> None:
        """Render all sets into ``<run_dir>/demonstrations``.

        Raises:
            DataError: A row cannot be used, none is left, or a resumed run began with others.
            OSError: A file cannot be read or written.
        """
        super().__init__(config.run_dir / "demonstrations")
        self._config, self._on_progress = config, on_progress
        self._digest = hashlib.sha256(repr((config.seed, config.num_demonstrations)).encode())
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        chat = ChatRenderer(tokenizer, config.data, config.rollout)
        self._renderer = DemonstrationRenderer(chat, config.demonstrations)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._train = self._render("train", config.demonstrations.train)
        path, digest = self.directory / "digest", self._digest.hexdigest()
        self._heldout = self._render("heldout", config.demonstrations.heldout)
        self._order = lru_cache(2)(self._permutation)
        if config.resume and path.exists() and path.read_text() != digest:
            raise DataError(
                f"{path}: the run began with other demonstrations, another seed or number per "
                "step; restore data, chat template and settings, or start another run"
            )
        atomic_write_text(path, digest)

    @property
    def steps_per_epoch(self) -> float:
        """Steps of a pass over the sets."""
        return len(self._train) / self._config.num_demonstrations

    @property
    def num_steps(self) -> int:
        """Steps of the run, those of its epochs rounded up."""
        epochs = self._config.demonstrations.epochs if self._config.imitates else None
        return math.ceil((epochs or 0) * self.steps_per_epoch) or self._config.train.steps

    @property
    def num_heldout_batches(self) -> int:
        """Batches of the held-out sets."""
        return math.ceil(len(self._heldout) / _BATCH_ROWS)

    def collect(self, step: int) -> EncodedBatch:
        """Encode the demonstrations of ``step`` (1, 2, …), a group each."""
        per_step, size = self._config.num_demonstrations, len(self._train)
        draws = range((step - 1) * per_step, step * per_step)
        rows = [int(self._order(draw // size)[draw % size]) for draw in draws]
        return _encode(self._train, rows, step)

    def heldout(self, number: int) -> EncodedBatch:
        """Encode batch ``number`` (1, 2, …) of the held-out sets."""
        rows = range(len(self._heldout))[(number - 1) * _BATCH_ROWS : number * _BATCH_ROWS]
        return _encode(self._heldout, rows, step=number)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._config.data.shuffle:
            return np.arange(len(self._train))
        return np.random.default_rng([self._config.seed, epoch]).permutation(len(self._train))

    def _render(self, name: str, sets: Sequence[DemonstrationSetConfig]) -> pa.Table:
        """Write the rows of ``sets`` into a file, say what became of them, and map the file."""
        path, schema = str(self.directory / f"{name}.arrow"), pa.schema(_TYPES)
        report = DemonstrationReport()
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for rows in batched(self._rows(sets, report), _BATCH_ROWS):
                writer.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=schema))
                self._on_progress(f"{name}: {report.num_kept} demonstrations")
        line = f"demonstrations.{name}: {report.summary()}"
        if name == "train" and not report.num_kept:
            raise DataError(f"{line}; add some, or raise max_tokens")
        if sets:
            say(line)
        return pa.ipc.open_file(pa.memory_map(path)).read_all()

    def _rows(
        self, sets: Sequence[DemonstrationSetConfig], report: DemonstrationReport
    ) -> Iterator[dict[str, Any]]:
        skips_bad = self._config.data.on_bad_row == "skip"
        for dataset in sets:
            for one in read_demonstrations(dataset, self._renderer, report, skips_bad=skips_bad):
                tokens = np.where(one.is_trained, one.token_ids, ~one.token_ids).tolist()
                values = (one.key, dataset.label, one.weight, tokens)
                self._digest.update(repr(values).encode())
                yield dict(zip(_TYPES, values, strict=True))


def _encode(table: pa.Table, rows: Iterable[int], step: int) -> EncodedBatch:
    samples = [_sample(table, row, number) for number, row in enumerate(rows)]
    groups = tuple(Group(sample.group_id, (sample,)) for sample in samples)
    batch = RolloutBatch(step=step, version=0, groups=groups)
    return EncodedBatch("demonstrations", bytearray(encode_batch(batch)))


def _sample(table: pa.Table, row: int, group_id: int) -> Sample:
    """Return a demonstration, whose weight is its reward.

    Nobody sampled it: the log-probs and versions of its tokens are 0.
    """
    key, source, weight, tokens = (column[row] for column in table.columns)
    tokens_L = tokens.values.to_numpy()
    ids_L, trained = np.where(tokens_L < 0, ~tokens_L, tokens_L), np.flatnonzero(tokens_L >= 0)
    start, gaps = int(trained[0]), np.flatnonzero(np.diff(trained) > 1)
    spans = zip((trained[gaps] + 1).tolist(), trained[gaps + 1].tolist(), strict=True)
    return Sample(
        group_id=group_id,
        index=0,
        prompt=PromptTokens(key.as_py(), ids_L[:start], source.as_py()),
        response_token_ids=ids_L[start : trained[-1] + 1],
        behaviour_logprobs=np.zeros(len(trained), np.float32),
        versions=(VersionSpan(0, len(trained)),),
        finish_reason=FinishReason.STOP,
        written=tuple(WrittenSpan(first - start, end - first) for first, end in spans),
        reward=weight.as_py(),
    )
