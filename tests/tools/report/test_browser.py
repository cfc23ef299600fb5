"""The page in headless Chromium: it draws, asks for nothing, and lets people read rollouts."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bapo_megatron import cli
from bapo_megatron.data.dump import read_batch, write_batch
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.tools.report.page import page_data, render
from bapo_megatron.types import WrittenSpan
from tests.chromium import Tab, chromium_tab
from tests.tools.report.made_runs import SCRIPT, make_run

pytestmark = pytest.mark.exhaustive

DRAWN = (
    "[...document.querySelectorAll('#panels .plot, #time-plot')]"
    ".every(plot => plot.querySelector('.scatterlayer path'))"
)


async def text(tab: Tab, selector: str) -> str:
    """The text of the first element that fits."""
    return await tab.run(f"document.querySelector({selector!r}).textContent")


async def choose(tab: Tab, name: str, value: str, event: str = "change") -> None:
    await tab.run(
        f"document.getElementById('{name}').value = '{value}';"
        f"document.getElementById('{name}').dispatchEvent(new Event('{event}'))"
    )


async def press(tab: Tab, *keys: str) -> None:
    for key in keys:
        await tab.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)


async def point_at(tab: Tab, plot: str, x: float) -> None:
    """Move the pointer to a value of a plot's x-axis."""
    await tab.run(
        f"(plot => {{ const axis = plot._fullLayout.xaxis;"
        f"const x = plot.getBoundingClientRect().left + axis._offset + axis.d2p({x});"
        f"plot.dispatchEvent(new MouseEvent('mousemove', {{clientX: x}})); }})({plot})"
    )


def write_page(folder: Path, *runs: Path) -> Path:
    page = folder / "page.html"
    page.write_text(render(page_data(runs)))
    return page


def visit(page: Path, look: Callable[[Tab], Awaitable[None]], place: str = "") -> Tab:
    """Open a page and look at it; nothing may fail in it."""

    async def run() -> Tab:
        async with chromium_tab(page.parent / "profile") as tab:
            await tab.open(f"{page.as_uri()}{place}")
            await look(tab)
        return tab

    tab = asyncio.run(run())
    assert tab.errors == []
    return tab


@pytest.mark.browser
def test_the_page_draws_opens_a_rollout_and_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "made")
    cli.app(["report", str(run_dir)], standalone_mode=False)
    page = run_dir / "report.html"
    assert f"wrote {page}" in capsys.readouterr().out

    async def look(tab: Tab) -> None:
        top = "document.getElementById('time').getBoundingClientRect().top"
        assert abs(await tab.run(top)) < 200
        await read_by_mouse(tab)
        await read_by_keyboard(tab)
        await change_theme(tab)

    tab = visit(page, look, "#time")
    assert {address for address in tab.requests if not address.startswith("data:")} == {
        page.as_uri()
    }


CODE = 'print("<b>1")\n2'
CALL = json.dumps({"name": "python", "arguments": {"code": CODE}})


@pytest.mark.browser
def test_calls_their_code_and_outputs_stand_apart(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "made")
    words = ["So ", "<tool_call>", CALL, "</tool_call>", "<tool_response>1", "done"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.save(str(run_dir / "model/tokenizer.json"))
    shutil.rmtree(run_dir / "tokens")
    dump = run_dir / "rollouts/step_000001.parquet"
    batch = read_batch(dump)
    for sample in batch.samples:
        sample.response_token_ids = np.arange(6, dtype=np.int32)
        sample.written = (WrittenSpan(4, 1),)
        sample.behaviour_logprobs = np.full(5, -1, np.float32)
        sample.versions = spans_of(np.ones(5, int))
    write_batch(dump, batch)

    async def look(tab: Tab) -> None:
        await tab.run("document.querySelector('#list .row').click()")
        await tab.until("document.querySelector('#rollout .tokens') !== null")
        assert await text(tab, ".tokens .call") == f"<tool_call>{CALL}</tool_call>"
        assert await text(tab, ".tokens .code") == CODE
        assert await text(tab, ".tokens .output") == "<tool_response>1"
        assert await text(tab, ".tokens") == f"So <tool_call>{CALL}</tool_call>{CODE}{words[4]}done"
        assert await tab.run("document.querySelectorAll('.tokens b').length") == 0

    visit(write_page(tmp_path, run_dir), look)


async def read_by_mouse(tab: Tab) -> None:
    assert await tab.run(DRAWN)
    assert await tab.run("document.getElementById('failure').hidden")
    assert await text(tab, "#list .row .facts") == f"{f'3{SCRIPT}'[:23]}… = 3 · 4 tok · age 3"
    # A real click on the first row of the list.
    await tab.run(
        "document.querySelector('#list .row')"
        ".scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    box = await tab.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('#list .row').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        await tab.send("Input.dispatchMouseEvent", type=kind, **place)
    await tab.until("document.querySelector('#rollout .tokens') !== null")
    assert await text(tab, ".tokens") == f"{SCRIPT} answer is 3"
    why = await text(tab, ".why")
    for fact in (f"extracted answer3{SCRIPT}", "graderequal text", "advantage−0.707"):
        assert fact in why
    # What was sampled is text: it made no element and ran nothing.
    assert await tab.run("document.querySelectorAll('main script, main img').length") == 0
    assert SCRIPT in await text(tab, "#rollout .facts")
    await tab.run("document.querySelector('#rollout summary').click()")
    assert await text(tab, "#rollout pre") == f"What is 1+2? {SCRIPT}"
    for grouping in ("problem", "reward", "length", "age", "exit", "source", "step"):
        await choose(tab, "pick-group", grouping)
        assert await tab.run("document.querySelectorAll('#list .row').length") == 4
    assert await tab.run("document.querySelectorAll('main script, main img').length") == 0
    assert await tab.run("document.title") == "made"


async def read_by_keyboard(tab: Tab) -> None:
    async def shades(coloring: str) -> list[str]:
        await tab.run(f"document.querySelector('[data-coloring={coloring}]').click()")
        return await tab.run("[...document.querySelectorAll('.tokens span')].map(s => s.className)")

    # Ratios 1, 2, 0.5 and 1.25; |log| above 0.02, 0.1, 0.2, 0.4 and 0.7.
    assert await shades("ratio") == ["", "p4", "n4", "p3"]
    assert await shades("version") == ["v0", "v0", "v1", "v2"]
    assert await shades("level") == ["m0"] * 4
    await tab.run("document.querySelector('.tokens').focus()")
    await press(tab, "ArrowRight", "ArrowRight")
    readout = await text(tab, ".readout")
    assert '" answer" (id 4)' in readout
    assert "ratio 2 " in readout
    await choose(tab, "search", "no such words", "input")
    await tab.until("document.getElementById('num-found').textContent === '0 of 4'")


async def change_theme(tab: Tab) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = await tab.run(paper)
    for _ in range(2):  # automatic → light → dark
        await tab.run("document.getElementById('theme').click()")
    assert await tab.run(paper) != light


@pytest.mark.browser
def test_tokens_are_coloured_by_where_a_teacher_disagrees(tmp_path: Path) -> None:
    # The policy's log-probs are −1, −2, −3 and −4.
    teacher = {"teacher_logprob": [-0.5, float("nan"), -1.2345, -5.0]}
    page = write_page(tmp_path, make_run(tmp_path / "made", columns=teacher))

    async def look(tab: Tab) -> None:
        await press(tab, "j")
        pick = "[data-coloring=difference]"
        assert await text(tab, pick) == "teacher − policy"
        await tab.run(f"document.querySelector('{pick}').click()")
        classes = "[...document.querySelectorAll('.tokens span')].map(s => s.className)"
        # |Δ| above 0.1, 0.3, 0.7, 1.5 and 3.
        assert await tab.run(classes) == ["p2", "", "p4", "n3"]
        assert (await text(tab, ".scale")).startswith(
            "difference of log-probs, nats< −3< −0.7< −0.10> 0.1> 0.7> 3"
        )
        await press(tab, "ArrowRight")
        assert "log-prob of the teacher −0.5 ·" in await text(tab, ".readout")
        await press(tab, "ArrowRight")
        assert "teacher" not in await text(tab, ".readout")
        # The next response was not scored.
        await press(tab, "j")
        assert await tab.run(f"document.querySelector('{pick}').disabled")
        assert await tab.run("document.querySelector('[aria-pressed=true]').dataset.coloring") == (
            "logprob"
        )

    visit(page, look)


@pytest.mark.browser
def test_keys_walk_through_all_groups_of_rollouts_and_their_tokens(tmp_path: Path) -> None:
    data = page_data([make_run(tmp_path / "made")])
    data["rollouts"][0]["samples"] *= 200  # two rows of each reward become 400
    for group, sum_ in zip(data["rollouts"][0]["groups"], ("12+3", "17+4"), strict=True):
        group["prompt"] = f"<user>What is {sum_}?<assistant>"
    page = tmp_path / "page.html"
    page.write_text(render(data))
    row = "document.activeElement.querySelector('.badge').textContent"
    count = "#list details[open] summary small"

    async def look(tab: Tab) -> None:
        await choose(tab, "pick-group", "reward")
        await press(tab, "j")
        top = await tab.run("document.getElementById('rollout').getBoundingClientRect().top")
        assert 0 < top < 450
        assert await text(tab, "#rollout h3") == "Step 1 · group 0 · response 0"
        assert await text(tab, count) == "400, 300 shown · mean reward 0"
        await tab.run("document.querySelector('.more').click()")
        assert await text(tab, count) == "400 · mean reward 0"
        await tab.run("document.querySelector('.row:nth-last-of-type(2)').click()")
        await press(tab, "j")
        assert await tab.run(row) == "1"  # of the group that was closed
        await press(tab, "k")
        assert await tab.run(row) == "0"
        assert await tab.run("document.querySelectorAll('#list [aria-current]').length") == 1
        await press(tab, "ArrowRight", "ArrowRight")
        assert "(id 4)" in await text(tab, ".readout")
        await press(tab, "/")
        assert await tab.run("document.activeElement.id") == "search"
        await press(tab, "Escape")
        assert await tab.run("document.activeElement.id") == ""
        await choose(tab, "pick-kind", "right")
        assert await text(tab, "#num-found") == "400 of 800"
        assert await text(tab, "#list .what") == "12+3"

    visit(page, look)


@pytest.mark.browser
def test_panels_show_values_of_the_pointer_s_step_only_and_mark_those_of_a_finding(
    tmp_path: Path,
) -> None:
    norms = {1: 0.31, 2: 0.45}
    single = {2: {"mismatch/logprob_abs_mean": 3e-7}, 5: {"train/updates": 0.0}}

    def metrics(step: int) -> dict[str, float]:
        row = {"reward/mean": 0.2, "policy/grad_norm": norms.get(step, 0.4)}
        return {**row, "reward/mixed_groups": 1.0, **single.get(step, {})}

    async def look(tab: Tab) -> None:
        plot = "[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{}'))"
        plot += ".querySelector('.plot')"
        reward = plot.format("Reward and")

        async def label(step: float) -> str:
            await point_at(tab, reward, step)
            return await tab.run(f"{reward}.querySelector('.tip').textContent")

        assert await label(0.2) == "step 0heldout: accuracy 25.0%evaluation: heldout 25.0%"
        assert await label(0.8) == "step 1mean reward 0.2weight sync, 0.00 s"
        assert await tab.run("document.querySelectorAll('#time-plot .tip').length") == 1

        async def axis(title: str) -> list[float]:
            return await tab.run(f"{plot.format(title)}._fullLayout.yaxis.range")

        low, high = await axis("Engine–trainer")
        assert -0.001 < low < 0
        assert 0.005 <= high < 0.006
        low, _ = await axis("Reward and")
        assert -0.1 < low < 0
        ticks = f"[...{plot.format('Gradient norm')}.querySelectorAll('.ytick')]"
        assert await tab.run(f"{ticks}.map(tick => tick.textContent)") == ["0.2", "0.5", "1"]
        labels = "[...{}.querySelectorAll('.xtick')].map(tick => tick.textContent)"
        for shown in (reward, "document.getElementById('time-plot')"):
            assert await tab.run(labels.format(shown)) == ["0", "1", "2", "3", "4", "5", "6"]
            await tab.run(f"void Plotly.relayout({shown}, {{'xaxis.range': [0.8, 3.2]}})")
            await tab.until(f"{labels.format(shown)}.join() === '1,2,3'")
        await tab.until(f"{labels.format(plot.format('Gradient'))}.join() === '1,2,3'")
        finding = "[...document.querySelectorAll('.finding')]"
        finding += ".find(line => line.textContent.includes('made no update'))"
        await tab.run(f"{finding}.querySelector('.link').click()")
        shape = await tab.run(f"(({{x0, x1}}) => [x0, x1])({reward}.layout.shapes[0])")
        assert shape == [4.5, 5.5]
        await tab.until(f"{plot.format('Outcome')}.getBoundingClientRect().top < innerHeight")
        await tab.run("document.querySelectorAll('.finding .link')[1].click()")
        assert await tab.run("document.getElementById('pick-group').value") == "reward"
        await tab.until(
            "document.getElementById('rollouts').getBoundingClientRect().top < innerHeight"
        )

    visit(write_page(tmp_path, make_run(tmp_path / "made", metrics=metrics)), look)


def write_replayed(folder: Path) -> list[Path]:
    """A run with rewards 0, 1, 1, 1, 1, 1 and 10 tokens per step, and its replay."""

    def metrics(step: int) -> dict[str, float]:
        row = {"reward/mean": float(step > 1), "train/trained_tokens": 10.0}
        return {**row, f"own/{SCRIPT}": 2.0 * step}

    again = {"replay": "first"}
    return [
        make_run(folder / "first", metrics=metrics),
        make_run(folder / "again", metrics=metrics, changes=again),
    ]


@pytest.mark.browser
def test_curves_are_smoothed_by_tokens_or_prompts_and_of_any_metric(tmp_path: Path) -> None:
    page = write_page(tmp_path, write_replayed(tmp_path)[0])
    plot = "document.querySelector('#panels .plot')"
    lines = f"{plot}.data.filter(trace => !trace.yaxis && trace.mode === 'lines')"

    async def look(tab: Tab) -> None:
        async def lines_of(key: str) -> list[Any]:
            return await tab.run(f"{lines}.map(trace => trace.{key})")

        await choose(tab, "smoothing", "0.5", "input")
        await tab.until(f"{lines}.length === 2")
        faint, smooth = await lines_of("y")
        assert faint == [0, 1, 1, 1, 1, 1]
        # Weights 1/2, 1/4 …, divided by their sum: (0·1/4 + 1·1/2) / (3/4), then 6/7.
        assert smooth[:3] == pytest.approx([0, 2 / 3, 6 / 7])
        assert await lines_of("line.width") == [1, 1.8]
        await choose(tab, "pick-axis", "trained tokens")
        assert await lines_of("x") == [[10, 20, 30, 40, 50, 60]] * 2
        await point_at(tab, plot, 19)
        assert await text(tab, "#panels .tip") == (
            "20 trained tokens, step 2mean reward 1 (smoothed 0.6667)weight sync, 0.00 s"
        )
        assert (await text(tab, "#time-plot .tip")).startswith("step 2training 6 s")
        await choose(tab, "pick-axis", "prompts")
        assert await lines_of("x") == [[2, 4, 6, 8, 10, 12]] * 2
        name = f"own/{SCRIPT}"
        await tab.run(
            "(pick => { pick.value = [...pick.options].find(o => o.value.startsWith('own/')).value;"
            "pick.dispatchEvent(new Event('change')); })(document.getElementById('pick-metric'))"
        )
        assert await text(tab, "#panels h3") == name
        await tab.until(f"{plot}.data !== undefined")
        assert (await lines_of("y"))[0] == [2, 4, 6, 8, 10, 12]
        assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
        await tab.run("document.querySelector('#panels .close').click()")
        assert await text(tab, "#panels h3") == "Reward and held-out accuracy mean"

    visit(page, look)


@pytest.mark.browser
def test_at_one_number_of_tokens_every_configuration_has_its_own_step(tmp_path: Path) -> None:
    def make(name: str, tokens: float) -> Path:
        def metrics(step: int) -> dict[str, float]:
            return {"reward/mean": 0.1 * step, "train/trained_tokens": tokens}

        return make_run(tmp_path / name, changes={"optimizer": {"lr": tokens}}, metrics=metrics)

    page = write_page(tmp_path, make("slow", 10.0), make("fast", 20.0))
    plot = "document.querySelector('#panels .plot')"

    async def look(tab: Tab) -> None:
        await choose(tab, "pick-axis", "trained tokens")
        await point_at(tab, plot, 41)
        assert await text(tab, "#panels .tip") == (
            "40 trained tokensslow: mean reward 0.4fast: mean reward 0.2weight sync, 0.00 s"
        )
        await point_at(tab, plot, 99)  # beyond the 60 tokens of one
        assert await text(tab, "#panels .tip") == "100 trained tokensfast: mean reward 0.5"

    visit(page, look)


@pytest.mark.browser
def test_tables_fit_a_wide_window_and_show_on_a_phone_that_they_go_on(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"seed{seed}", seed=seed) for seed in range(3)]
    page = write_page(tmp_path, *seeds, *write_replayed(tmp_path))
    cut = (
        "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
    )

    async def look(tab: Tab) -> None:
        async def width(pixels: int) -> None:
            size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size)
            await tab.until(
                "new Promise(done => requestAnimationFrame(() => setTimeout(done, 99, 1)))"
            )

        await tab.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        await width(1400)
        assert await tab.run(f"{cut}.map(box => box.textContent.slice(0, 40))") == []
        heights = "[...document.querySelectorAll('.figures dt')].map(dt => dt.offsetHeight)"
        assert max(await tab.run(heights)) < 25
        await width(390)
        root = "document.documentElement"
        assert await tab.run(f"{root}.scrollWidth === {root}.clientWidth")
        assert await tab.run(f"{cut}.length") > 3
        assert await tab.run(f"{cut}.every(box => box.closest('.wide-table'))")
        inner = "[...document.querySelectorAll('#cards *')]"
        inner += ".some(part => /auto|scroll/.test(getComputedStyle(part).overflowY)"
        inner += " && part.scrollHeight > part.clientHeight + 1)"
        assert await tab.run(inner) is False
        last = f"{cut}[0]"
        await tab.run(f"{last}.scrollLeft = 9999")
        await tab.until(f"!{last}.closest('.wide-table')")

    visit(page, look)


def test_a_page_for_many_runs_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = page_data([make_run(tmp_path / "made")])
    monkeypatch.setattr("bapo_megatron.tools.report.page.MAX_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"report: .*at most 1 MB, .* \d\.\d; give fewer"):
        render(data)
