"""``plot``: colours tell runs, lines tell series, seeds are one band."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from bapo_megatron import cli
from bapo_megatron.tools.plot import dynamics_figure
from bapo_megatron.tools.report.figures import PANELS

pytestmark = pytest.mark.exhaustive

METRICS = [metric for panel in PANELS for metric in panel.metrics.values()]


def write_run(folder: Path, objective: str, seed: int) -> Path:
    run = folder / f"{objective}-{seed}"
    run.mkdir(parents=True)
    settings = {"name": run.name, "seed": seed, "algorithm": {"objective": objective}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {"step": step, "eval/sums/avg_at_k": 0.5, "eval/sums/avg_at_k_low": 0.4}
        | dict.fromkeys(METRICS, float(step + seed))
        for step in range(1, 4)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def labels_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_it_writes_a_png_beside_the_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, "bapo", 0)
    cli.app(["plot", str(run)], standalone_mode=False)
    assert (run / "dynamics.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_that_is_not_utf_8_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"r\xff"), "bapo", 0)
    figure = dynamics_figure([run, write_run(tmp_path / "a", "bapo", 0)])
    FigureCanvasAgg(figure).draw()
    assert labels_of(figure) == [r"r\xff/bapo-0", "a/bapo-0"]


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five configurations, the first with three seeds; drawn, so that every place is known."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder, "bapo", seed) for seed in range(3)]
    runs += [write_run(folder, name, 0) for name in ("clip", "cispo", "gspo", "none")]
    drawn = dynamics_figure(runs)
    FigureCanvasAgg(drawn).draw()
    return drawn


def axis_of(figure: Any, title: str) -> Any:
    return next(axis for axis in figure.axes if axis.get_title() == title)


def test_every_run_has_one_colour_and_every_series_one_line(figure: Any) -> None:
    assert labels_of(figure) == ["bapo (3 seeds)", "clip-0", "cispo-0", "gspo-0", "none-0"]
    colors = [to_hex(line.get_color()) for line in figure.legends[0].get_lines()]
    assert len(set(colors)) == 5
    lines = axis_of(figure, "Clip bounds").get_lines()
    drawn = {(line.get_linestyle(), to_hex(line.get_color())) for line in lines}
    assert drawn == {(style, color) for style in ("-", "--") for color in colors}


def test_a_short_run_has_a_tick_at_steps_only(figure: Any) -> None:
    ticks = axis_of(figure, "Policy entropy").get_xticks()
    assert all(tick == int(tick) for tick in ticks)


def test_seeds_are_their_mean_in_a_band_from_minimum_to_maximum(figure: Any) -> None:
    entropy = axis_of(figure, "Policy entropy")
    assert list(entropy.get_lines()[0].get_ydata()) == [2.0, 3.0, 4.0]
    [band] = entropy.collections
    heights = band.get_paths()[0].get_extents()
    assert (heights.ymin, heights.ymax) == (1.0, 5.0)


def test_a_curve_of_one_value_is_a_point(tmp_path: Path) -> None:
    run = write_run(tmp_path, "bapo", 0)
    first, *rest = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    for row in rest:
        del row["policy/entropy"]
    rows = (json.dumps(row) + "\n" for row in (first, *rest))
    (run / "metrics.jsonl").write_text("".join(rows))
    drawn = dynamics_figure([run])
    markers = {
        title: axis_of(drawn, title).get_lines()[0].get_marker()
        for title in ("Policy entropy", "Token age")
    }
    assert markers == {"Policy entropy": "o", "Token age": "None"}


def test_a_score_has_its_interval(figure: Any) -> None:
    reward = axis_of(figure, "Reward and held-out accuracy")
    bars = [bar for bar in reward.collections if len(bar.get_paths()) == 3]
    assert len(bars) == 7  # a run each
    ends = bars[0].get_paths()[0].vertices
    assert ends.tolist() == [[1.0, 0.4], [1.0, 0.5]]


def test_more_runs_than_a_palette_has_still_differ(tmp_path: Path) -> None:
    figure = dynamics_figure([write_run(tmp_path, f"own{n}:loss", 0) for n in range(23)])
    assert len({to_hex(line.get_color()) for line in figure.legends[0].get_lines()}) == 23
