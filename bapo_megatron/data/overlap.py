"""Finds evaluation prompts among the training prompts.

Rendered prompts are compared without regard to case, white space, punctuation, LaTeX spacing and
delimiters, and once more without the words at their ends that all prompts have (a chat template),
or all prompts of their set ("Solve the following problem …").
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.types import Prompt

_MIN_WORDS = 8
"""Without its instructions, a question of fewer words, such as "3 + 4", is too generic."""
_SAME_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_LATEX_SPACING = re.compile(
    r"\\(?:[,;:!>()\[\] ]|"
    r"(?:left|right|[bB]igg?[lr]?|q?quad|displaystyle|textstyle|limits)(?![a-zA-Z]))"
)
"""Spacing, sizes and delimiters of formulas."""
_POINT = re.compile(r"(?<!\d)[.,]|[.,](?!\d)")
"""Points and commas, except those within numbers such as 3.14 and 1,000."""
_SIGNS: dict[int, str | None] = {ord(sign): " " for sign in "$~?!;:'\"`‘’“”"} | {
    ord(brace): None for brace in "{}"
}
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Prompts that an evaluation set shares with a training set."""

    train_name: str
    eval_name: str
    num_eval_prompts: int
    """Prompts of the evaluation set that the training set has as well."""
    of_eval_prompts: int
    num_train_prompts: int
    """Prompts of the training set that the evaluation set has as well."""
    first_eval_id: str
    first_train_id: str

    def warning(self) -> str:
        """Describe the overlap on one line."""
        return (
            f"{self.num_eval_prompts} of {self.of_eval_prompts} prompts of evaluation set "
            f"'{self.eval_name}' are in training set '{self.train_name}' too "
            f"({self.num_train_prompts} there), the first: {self.first_eval_id} is "
            f"{self.first_train_id}; scores on them show memorization: remove them from one set"
        )


def find_overlaps(
    train_sets: Sequence[PromptSet], eval_sets: Sequence[tuple[str, Sequence[Prompt]]]
) -> list[Overlap]:
    """Find every pair of a training set and a (named) evaluation set with a prompt in common."""
    if not eval_sets:
        return []
    keys_by_set = _keys([*(prompts for _, prompts in eval_sets), *(s.prompts for s in train_sets)])
    overlaps = []
    for train_set, train_keys in zip(train_sets, keys_by_set[len(eval_sets) :], strict=True):
        rows_of: dict[str, list[int]] = {}
        for row, keys in enumerate(train_keys):
            for key in keys:
                rows_of.setdefault(key, []).append(row)
        for (name, prompts), eval_keys in zip(eval_sets, keys_by_set, strict=False):
            matches = [
                (eval_row, rows)
                for eval_row, keys in enumerate(eval_keys)
                if (rows := sorted({row for key in keys for row in rows_of.get(key, ())}))
            ]
            if matches:
                first_eval, first_rows = matches[0]
                overlap = Overlap(
                    train_name=train_set.name,
                    eval_name=name,
                    num_eval_prompts=len(matches),
                    of_eval_prompts=len(prompts),
                    num_train_prompts=len({row for _, rows in matches for row in rows}),
                    first_eval_id=prompts[first_eval].prompt_id,
                    first_train_id=train_set.prompts[first_rows[0]].prompt_id,
                )
                overlaps.append(overlap)
    return overlaps


def normalise(text: str) -> str:
    """Return the words and signs of a text, one space between them."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if "\\" in text:
        text = _LATEX_SPACING.sub(" ", _SAME_FRACTION.sub(r"\\frac", text))
    return " ".join(_WORD.findall(_POINT.sub(" ", text.translate(_SIGNS)).casefold()))


def _keys(prompts_by_set: Sequence[Sequence[Prompt]]) -> list[list[set[str]]]:
    """The texts by which each prompt of each set is compared.

    The whole prompt, the prompt without the words at either end that all prompts of all sets share,
    and the prompt without those that all prompts of its set share.
    """
    normalised_by_set = [
        {text: normalise(text) for text in {prompt.text for prompt in prompts}}
        for prompts in prompts_by_set
    ]
    template = _instructions([text for known in normalised_by_set for text in known.values()])
    keys_by_set = []
    for prompts, normalised_of in zip(prompts_by_set, normalised_by_set, strict=True):
        limits = {template, _instructions(list(normalised_of.values()))}
        keys_of = {}
        for text, whole in normalised_of.items():
            parts = {whole[before : max(before, len(whole) - after)] for before, after in limits}
            keys_of[text] = {whole, *(part for part in parts if len(part.split()) >= _MIN_WORDS)}
        keys_by_set.append([keys_of[prompt.text] for prompt in prompts])
    return keys_by_set


def _instructions(texts: Sequence[str]) -> tuple[int, int]:
    """How many characters all texts have in common at their start and end, in whole words."""
    return _common_start(texts), _common_start([text[::-1] for text in texts])


def _common_start(texts: Sequence[str]) -> int:
    return commonprefix(texts).rfind(" ") + 1  # noqa: RUF071 - characters are meant
