"""Response tokens as people read them, and the ratios that ``train.dump_tokens`` kept.

Shape legend: R = tokens of a response, Q = those of them that the policy sampled, T = tokens of an
update in a token dump.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bapo_megatron.data.columns import PARQUET_ERRORS, DumpError
from bapo_megatron.errors import first_line
from bapo_megatron.report.runs import Run

_MAX_PENDING = 4
"""Tokens of one character at most: it has up to four bytes in UTF-8."""
_INCOMPLETE = "\ufffd"


class Pieces:
    """Token ids as numbers of (id, text) pairs, which the page holds once per run."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a ``tokenizers.Tokenizer``, or None: then texts are token ids."""
        self._tokenizer = tokenizer
        self._numbers: dict[tuple[int, str], int] = {}
        self._alone: dict[int, str] = {}
        self.num_bytes = 0
        """Size of the table as JSON, about."""

    @property
    def table(self) -> list[tuple[int, str]]:
        """The pairs, by number."""
        return list(self._numbers)

    @property
    def has_texts(self) -> bool:
        """Whether tokens have texts, not only ids."""
        return self._tokenizer is not None

    def encode(self, token_ids: np.ndarray) -> list[int]:
        """Return the number of every token's pair.

        A character that several tokens share is the text of the last of them; the others are empty.
        """
        numbers: list[int] = []
        pending: list[int] = []
        for token in token_ids.tolist():
            pending.append(token)
            text = self._text(pending)
            if text.endswith(_INCOMPLETE) and len(pending) < _MAX_PENDING:
                continue
            numbers += [self._number(each, "") for each in pending[:-1]]
            numbers.append(self._number(token, text))
            pending = []
        if pending:
            numbers += [self._number(each, "") for each in pending[:-1]]
            numbers.append(self._number(pending[-1], self._text(pending)))
        return numbers

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return f" {ids[-1]}"
        if len(ids) > 1:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        if ids[0] not in self._alone:
            self._alone[ids[0]] = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return self._alone[ids[0]]

    def _number(self, token: int, text: str) -> int:
        if (token, text) not in self._numbers:
            self._numbers[token, text] = len(self._numbers)
            self.num_bytes += len(json.dumps([token, text])) + 1
        return self._numbers[token, text]


def find_tokenizer(run: Run, given: Path | None = None) -> Any:
    """Load the tokenizer of a run: the one ``given``, that of its export, or of ``model.path``.

    Returns:
        A ``tokenizers.Tokenizer``; None if nothing was given and neither directory has one.

    Raises:
        ValueError: The directory that was given has no readable tokenizer.json.
    """
    from tokenizers import Tokenizer

    places = [run.path / "hf", Path(str(run.settings.get("model.path", "")))]
    for directory in [given] if given is not None else places:
        file = directory / "tokenizer.json"
        if file.is_file() or given is not None:
            try:
                return Tokenizer.from_file(str(file))
            except Exception as error:
                raise ValueError(
                    f"{file}: not a readable tokenizer ({error}); give --tokenizer a Hugging Face "
                    "model directory"
                ) from error
    return None


class TokenDumps:
    """What ``train.dump_tokens`` kept of one step.

    Its rows name no sample. Those of a response stand together, and its behaviour log-probs tell it
    from others: bit for bit those of the rollout dump, unless ``behaviour: recomputed`` replaced
    them or context parallelism divided the response.
    """

    def __init__(self, run: Run, step: int) -> None:
        """Read the dumps of the first pass over the batch; there may be none.

        Raises:
            DumpError: A file is not a readable token dump.
        """
        columns = ["logprob", "behaviour_logprob"]
        num_updates = int(run.settings.get("algorithm.updates_per_batch", 1))
        self._updates: list[tuple[bytes, np.ndarray]] = []
        for update in range(num_updates):
            path = run.path / "tokens" / f"step_{step:06d}_update_{update:03d}.parquet"
            if not path.exists():
                continue
            try:
                table = pq.read_table(path, columns=columns)
            except PARQUET_ERRORS as error:
                reason = first_line(error)
                raise DumpError(f"{path}: not a token dump ({reason}); remove it") from error
            # Not ``to_numpy``: it imports pandas.
            logprob_T, behaviour_T = (
                np.from_dlpack(table[name].combine_chunks()).astype("<f4") for name in columns
            )
            self._updates.append((behaviour_T.tobytes(), logprob_T))

    @property
    def exist(self) -> bool:
        """Whether the step has any."""
        return bool(self._updates)

    def ratios(self, behaviour_logprobs: np.ndarray) -> np.ndarray | None:
        """Return π/μ [Q] of a response at its update.

        None if it is in no update (no gradient, or masked), or several have it with different
        ratios, as equal responses to one prompt do.
        """
        wanted = np.ascontiguousarray(behaviour_logprobs, "<f4")
        needle, found = wanted.tobytes(), {}
        for content, logprob_T in self._updates:
            at = content.find(needle) if needle else -1
            while at >= 0:
                if at % 4 == 0:
                    own_Q = logprob_T[at // 4 : at // 4 + len(wanted)]
                    found[own_Q.tobytes()] = own_Q
                at = content.find(needle, at + 4 - at % 4)
        if len(found) != 1:
            return None
        ratio_Q: np.ndarray = np.exp(next(iter(found.values())).astype(np.float64) - wanted)
        return ratio_Q
