"""A few samples of a step with their texts, for trackers."""

from pathlib import Path

from bapo_megatron.data.dump import dump_path, read_batch, texts_by_sample
from bapo_megatron.telemetry.trackers import SampleRow

_NUM_ROWS = 8
_MAX_CHARS = 4000
"""Length of a prompt, and of a response, in the table."""


def sample_rows(dumps: Path, step: int) -> list[SampleRow]:
    """Return samples of a step from the lowest reward to the highest, evenly spaced by rank.

    Samples without a text are left out, and so is the middle of a long text. Empty where its dump
    or its texts are not kept.

    Raises:
        DumpError: A file is damaged, or of another version's format.
    """
    path = dump_path(dumps, step)
    try:
        texts, batch = texts_by_sample(path), read_batch(path)
    except FileNotFoundError:
        return []
    if texts is None:
        return []
    with_text = (each for each in batch.samples if (each.group_id, each.index) in texts)
    ranked = sorted(with_text, key=lambda sample: sample.reward)
    last = min(_NUM_ROWS, len(ranked)) - 1
    picked = [ranked[number * (len(ranked) - 1) // max(last, 1)] for number in range(last + 1)]
    rows = []
    for sample in picked:
        text = texts[sample.group_id, sample.index]
        rows.append(
            SampleRow(
                step=step,
                group=sample.group_id,
                sample=sample.index,
                reward=sample.reward,
                tokens=sample.num_sampled,
                finish=sample.finish_reason.value,
                prompt=_shortened(text.prompt_text),
                response=_shortened("\n\n".join(text.turns) or text.response_text),
                answer=text.answer,
            )
        )
    return rows


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n[…]\n{text[-half:]}"
