"""``plot``: colours tell runs, lines tell series, seeds are one band, no legend covers a curve."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from bapo_megatron import cli
from bapo_megatron.tools.plot import PANELS, dynamics_figure

if TYPE_CHECKING:
    from pathlib import Path

METRICS = [metric for series in PANELS.values() for metric in series.values()]


def write_run(folder: Path, objective: str, seed: int) -> Path:
    run = folder / f"{objective}-{seed}"
    run.mkdir(parents=True)
    settings = {"name": run.name, "seed": seed, "algorithm": {"objective": objective}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {"step": step, "eval/sums/avg_at_k": 0.5} | dict.fromkeys(METRICS, float(step + seed))
        for step in range(1, 4)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_it_writes_a_png_beside_the_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, "bapo", 0)
    cli.app(["plot", str(run)], standalone_mode=False)
    assert (run / "dynamics.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file; give the directory of a run"):
        dynamics_figure([tmp_path])


def test_a_name_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"r\xff"), "bapo", 0)
    drawn = dynamics_figure([run, write_run(tmp_path / "a", "bapo", 0)])
    FigureCanvasAgg(drawn).draw()
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == [r"r\xff/bapo-0", "a/bapo-0"]


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five configurations, the first with three seeds; drawn, so that every place is known."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder, "bapo", seed) for seed in range(3)]
    runs += [write_run(folder, name, 0) for name in ("clip", "cispo", "gspo", "none")]
    drawn = dynamics_figure(runs)
    FigureCanvasAgg(drawn).draw()
    return drawn


def test_every_run_has_one_colour_and_every_series_one_line(figure: Any) -> None:
    [legend] = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["bapo (3 seeds)", "clip-0", "cispo-0", "gspo-0", "none-0"]
    colors = [to_hex(line.get_color()) for line in legend.get_lines()]
    assert len(set(colors)) == 5
    bounds = figure.axes[list(PANELS).index("Clip bounds")]
    drawn = [(line.get_linestyle(), to_hex(line.get_color())) for line in bounds.get_lines()]
    assert drawn == [(style, color) for style in ("-", "--") for color in colors]


def test_seeds_are_their_mean_in_a_band_from_the_smallest_to_the_largest(figure: Any) -> None:
    entropy = figure.axes[list(PANELS).index("Entropy of the policy")]
    mean = entropy.get_lines()[0]
    assert list(mean.get_ydata()) == [2.0, 3.0, 4.0]
    [band] = entropy.collections
    heights = band.get_paths()[0].get_extents()
    assert (heights.ymin, heights.ymax) == (1.0, 5.0)


def test_no_legend_covers_a_panel(figure: Any) -> None:
    panels = [axis.get_window_extent() for axis in figure.axes]
    legends = [axis.get_legend() for axis in figure.axes] + figure.legends
    assert len(legends) == 10
    for legend in legends:
        assert not any(legend.get_window_extent().overlaps(panel) for panel in panels)


def test_more_runs_than_a_palette_has_still_differ(tmp_path: Path) -> None:
    drawn = dynamics_figure([write_run(tmp_path, f"own{n}:loss", 0) for n in range(23)])
    assert len({to_hex(line.get_color()) for line in drawn.legends[0].get_lines()}) == 23
