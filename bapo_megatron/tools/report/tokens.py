"""Response tokens as people read them, and the ratios that ``train.dump_tokens`` kept.

Shape legend: Q = tokens of a response that the policy sampled, T = tokens of an update.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.token_dump import read_token_dump, token_dump_paths
from bapo_megatron.runtime.files import read_regular
from bapo_megatron.tools.report.runs import Run
from bapo_megatron.types import Sample

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
                return Tokenizer.from_buffer(read_regular(file))
            except OSError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{file}: not a readable tokenizer ({error}); give --tokenizer a Hugging Face "
                    "model directory"
                ) from error
    return None


class TokenDumps:
    """What ``train.dump_tokens`` kept of one step: ratios by response."""

    def __init__(self, run: Run, step: int) -> None:
        """Read the dumps of the first pass over the batch; there may be none.

        Raises:
            DumpError: A file is damaged, no token dump, or of another version's format.
        """
        self._ratios: dict[tuple[int, int], np.ndarray] = {}
        self.exist = False
        """Whether the step has any."""
        for path in token_dump_paths(run.path, step):
            self.exist = True
            self._add(read_token_dump(path))

    def _add(self, columns: Mapping[str, np.ndarray]) -> None:
        logprob_T, behaviour_T = columns["logprob"], columns["behaviour_logprob"]
        if not len(logprob_T):
            return
        ratio_T = np.exp(logprob_T.astype(np.float64) - behaviour_T)
        names_T = np.stack([columns["group_id"], columns["index"]], axis=1)
        starts = np.flatnonzero((np.diff(names_T, axis=0) != 0).any(axis=1)) + 1
        for name, ratio_Q in zip(
            names_T[[0, *starts]].tolist(), np.split(ratio_T, starts), strict=True
        ):
            self._ratios.setdefault((name[0], name[1]), ratio_Q)  # the first pass comes first

    def ratios(self, sample: Sample) -> np.ndarray | None:
        """Return π/μ [Q] of a response at its update; None if it was in none that was kept.

        Raises:
            DumpError: The dump has another number of its tokens.
        """
        ratio_Q = self._ratios.get((sample.group_id, sample.index))
        if ratio_Q is not None and len(ratio_Q) != sample.num_sampled:
            raise DumpError(
                f"tokens/: {len(ratio_Q)} tokens of sample {sample.index} of group "
                f"{sample.group_id}, whose dump in rollouts/ has {sample.num_sampled}; remove the "
                "token dumps, they are of another run"
            )
        return ratio_Q
