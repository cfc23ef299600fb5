"""What a run ends with on the terminal and in ``summary.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bapo_megatron.trainer.checkpointing import Progress
from bapo_megatron.trainer.summary import report_run
from tests.config.files import run_config

if TYPE_CHECKING:
    from pathlib import Path


def write_rows(run_dir: Path, *rows: dict[str, float]) -> None:
    lines = [json.dumps({"step": number, **row}) for number, row in enumerate(rows)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_run_without_one_update_says_how_many_rewards_were_equal_and_tokens_masked(
    tmp_path, capsys
) -> None:
    write_rows(
        tmp_path,
        {"eval/sums/avg_at_k": 0.0},
        {"reward/mixed_groups": 0.0, "train/skipped_updates": 4.0, "train/nonfinite_tokens": 0.0},
        {
            "reward/mixed_groups": 0.25,
            "rollout/masked_token_share": 1.0,
            "train/skipped_updates": 4.0,
            "train/nonfinite_tokens": 3.0,
        },
    )
    report_run(run_config(tmp_path, log={"console": False}), Progress(finished_steps=2), {})
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "nothing was trained: all 8 updates were skipped; 88% of the groups had equal rewards, "
        "100% of the tokens were masked, 3 were not finite; read responses with bapo-megatron "
        f"report {tmp_path}\n"
    )


def test_the_table_and_the_file_have_the_same_numbers_and_no_empty_times(tmp_path, capsys) -> None:
    progress = Progress(
        finished_steps=6,
        updates=12,
        generated_tokens=5000.0,
        generation_s=2.0,
        exits={"start": 1, "upper": 3},
        accuracy_before=0.25,
        accuracy_after=0.5,
        num_prompts=40,
    )
    report_run(run_config(tmp_path), progress, {"training": 1.25, "export": 0.01})
    output = capsys.readouterr()
    assert output.err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in output.out.splitlines()]
    assert [row for row in rows if row] == [
        ["held-out prompts", "40"],
        ["accuracy before", "25.0%"],
        ["accuracy after", "50.0%"],
        ["steps (optimizer updates)", "6 (12)"],
        ["searches that moved a bound", "75%"],
        ["generated tokens/s", "2,500"],
        ["time: training", "1.2 s"],
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["updates"], summary["search_moved_share"]) == (12, 0.75)
    assert summary["phase_s"] == {"training": 1.25, "export": 0.01}
    assert summary["versions"]["megatron-core"] == "0.19.2"
