"""The page of long runs: seconds to write it, its size, and seconds to open it in Chromium.

    python -m tests.benchmarks.bench_report --out docs/benchmarks/report_cpu_202611

Two made runs: many steps with many responses each, and one response as long as a context. Tokens
are random words of a large vocabulary, so nothing of them can be stored once for all. Dumps that
the page does not read are links to those that it reads.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bapo_megatron.data.dump import write_batch, write_texts
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.tools.report.page import page_data, render
from bapo_megatron.tools.report.rollouts import MAX_STEPS, spread
from bapo_megatron.types import Group, PromptTokens, RolloutBatch, SampleText
from tests.benchmarks.harness import REPOSITORY, columns, finish, machine, page, report_arguments
from tests.benchmarks.samples import make_sample
from tests.chromium import Tab, chromium_tab

WORDS = 32_000
METRICS = REPOSITORY / "examples/demo_grpo/metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a made run holds."""

    steps: int
    groups: int
    """Of a step."""
    responses: int
    """Of a group."""
    mean_tokens: int
    """Of a response; lengths are from half of it to one and a half, in a single step all equal."""

    def __str__(self) -> str:
        responses = f"{self.groups * self.responses:,} responses of {self.mean_tokens:,} tokens"
        return f"{self.steps:,} steps × {responses} on average" if self.steps > 1 else responses


SHAPES = (Shape(1000, 32, 8, 500), Shape(1, 1, 2, 65_536))


COLUMNS = {
    "run": "{shape}",
    "dumps read": "{dump_mb:.1f} MB",
    "page": "{page_mb:.1f} MB",
    "tokens on it": "{shown_tokens:,}",
    "written in": "{write_s:.1f} s",
    "opened in": "{open_s:.1f} s",
    "response shown in": "{read_s:.2f} s",
}
"""Medians over the rounds: from the run's files to the page's text, from Chromium's request to the
last figure, from the click on the longest response to its tokens on the screen."""


def make_run(folder: Path, shape: Shape) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "made", "train": {"steps": 1000}}))
    row = read_metrics(METRICS)[-1]
    random = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, shape.steps + 1):
            noisy = {name: value * random.uniform(0.9, 1.1) for name, value in row.items()}
            file.write(json.dumps({**noisy, "step": step}) + "\n")
    (folder / "hf").mkdir()
    vocabulary = {f" w{number}": number for number in range(WORDS)}
    Tokenizer(WordLevel(vocabulary, unk_token=" w0")).save(str(folder / "hf/tokenizer.json"))
    read = spread(shape.steps, MAX_STEPS)
    paths = [folder / f"rollouts/step_{n:06d}.parquet" for n in range(1, shape.steps + 1)]
    for index in read:
        batch, texts = _batch(index + 1, shape, random)
        write_batch(paths[index], batch)
        write_texts(paths[index], index + 1, texts)
    for index, path in enumerate(paths):
        if index not in read:
            path.hardlink_to(paths[max(number for number in read if number < index)])
    return folder


def _batch(
    step: int, shape: Shape, random: np.random.Generator
) -> tuple[RolloutBatch, list[SampleText]]:
    groups, texts = [], []
    for group_id in range(shape.groups):
        prompt = PromptTokens(f"made:{group_id}", random.integers(0, WORDS, 100, np.int32), "made")
        asked = " ".join(f"w{token}" for token in prompt.token_ids)
        samples = []
        for index in range(shape.responses):
            length = shape.mean_tokens
            if shape.steps > 1:
                length = int(random.integers(length // 2, length + length // 2))
            tokens = random.integers(0, WORDS, length, np.int32)
            versions = random.integers(step, step + 4, length)
            reward = float(random.integers(0, 2))
            spans = [(step + n, int((versions == step + n).sum())) for n in range(4)]
            logprobs = -random.exponential(0.5, length)
            samples.append(make_sample(group_id, index, prompt, tokens, logprobs, spans, reward))
            text = " ".join(f"w{token}" for token in tokens)
            texts.append(SampleText(group_id, index, asked, "1", text))
        groups.append(Group(group_id, tuple(samples)))
    return RolloutBatch(step=step, version=step + 4, groups=tuple(groups)), texts


def measure(run: Path, shape: Shape, rounds: int) -> dict[str, Any]:
    """Write the page of a made run and open it, several times."""
    html = run / "report.html"
    write_s = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        data = page_data([run])
        html.write_text(render(data), encoding="utf-8")
        write_s.append(time.perf_counter() - begin_s)
    with _browser(run / "profile") as (runner, tab):
        open_s, read_s = zip(
            *(runner.run(_open(tab, html.as_uri())) for _ in range(rounds)), strict=True
        )
        assert not tab.errors, tab.errors
    dumps = [
        run / f"rollouts/step_{index + 1:06d}.parquet" for index in spread(shape.steps, MAX_STEPS)
    ]
    (rollouts,) = data["rollouts"]
    return {
        "shape": str(shape),
        "dump_mb": sum(dump.stat().st_size for dump in dumps) / 1e6,
        "page_mb": html.stat().st_size / 1e6,
        "shown_tokens": sum(len(sample["pieces"]) for sample in rollouts["samples"]),
        "write_s": statistics.median(write_s),
        "open_s": statistics.median(open_s),
        "read_s": statistics.median(read_s),
    }


@contextmanager
def _browser(profile: Path) -> Iterator[tuple[asyncio.Runner, Tab]]:
    with asyncio.Runner() as runner:
        context = chromium_tab(profile)
        tab = runner.run(context.__aenter__())
        try:
            yield runner, tab
        finally:
            runner.run(context.__aexit__(None, None, None))


async def _open(tab: Tab, address: str) -> tuple[float, float]:
    """Seconds until the page is drawn, and until its longest response is."""
    await tab.send("Page.navigate", url="about:blank")
    begin_s = time.perf_counter()
    await tab.open(address)
    open_s = time.perf_counter() - begin_s
    read_ms = await tab.run(
        "(async () => {"
        "document.getElementById('pick-sort').value = 'long';"
        "document.getElementById('pick-sort').dispatchEvent(new Event('change'));"
        "const begin = performance.now();"
        "document.querySelector('#list .row').click();"
        "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
        "return performance.now() - begin; })()"
    )
    return open_s, read_ms / 1e3


def main() -> None:
    parser = report_arguments("The page of long runs.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pages = []
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(SHAPES):
            run = make_run(Path(folder) / f"run{number}", shape)
            pages.append(measure(run, shape, options.rounds))
    where = machine()
    text = page(
        "The page of long runs",
        where,
        "Medians of the rounds. The page may have 20 MB at most: it shows a sample of a long run, "
        "and the two ends of a response that does not fit.",
        columns(pages, COLUMNS),
    )
    finish(options.out, text, {"machine": where, "pages": pages})


if __name__ == "__main__":
    main()
