"""A sweep's file: the runs that it asks for, and what is refused before anything starts."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import (
    ConfigError,
    dump_yaml,
    load_config,
    parse_section,
    read_mapping,
)
from bapo_megatron.tools.sweep import file as sweep_file
from bapo_megatron.tools.sweep.file import SweepConfig, load_sweep
from tests.launch import REPOSITORY
from tests.tools.sweep.files import VARIANTS, write_sweep


def test_every_variant_is_run_by_every_seed_and_pairs_come_first(
    base: Path, tmp_path: Path
) -> None:
    sweep = load_sweep(write_sweep(tmp_path, base, overrides=["optimizer.lr=0.5"], seeds=[3, 1]))
    assert [run.label for run in sweep.runs] == [
        *("grpo/seed3", "bapo/seed3"),
        *("grpo/seed1", "bapo/seed1"),
    ]
    grpo = sweep.runs[2]
    assert grpo.run_dir == tmp_path / "sweep" / "grpo" / "seed1"
    assert (grpo.config.seed, grpo.config.name) == (1, "sweep-grpo-seed1")
    assert (grpo.config.algorithm.objective, grpo.config.optimizer.lr) == ("clip", 0.5)
    assert grpo.command() == [
        *(sys.executable, "-m", "bapo_megatron", "train", str(base)),
        *("optimizer.lr=0.5", "algorithm.objective=clip", "name=sweep-grpo-seed1"),
        *(f'run_dir="{grpo.run_dir}"', "seed=1", "--resume"),
    ]
    assert [run.label for run in sweep.variants["bapo"]] == ["bapo/seed3", "bapo/seed1"]


def test_several_ranks_are_started_by_torchrun(base: Path, tmp_path: Path) -> None:
    wide = {"wide": ["parallel.tensor=2"], "narrow": []}
    two, one = load_sweep(write_sweep(tmp_path, base, variants=wide, seeds=[0])).runs
    launcher = ["-m", "bapo_megatron.torchrun", "--nproc-per-node", "2", "-m", "bapo_megatron"]
    assert two.command()[1:7] == launcher
    assert (two.ranks, one.ranks) == (2, 1)
    # Data parallelism is what the ranks allow beyond the layout.
    sweep = load_sweep(write_sweep(tmp_path, base, ranks=2))
    assert {run.ranks for run in sweep.runs} == {2}


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((REPOSITORY / "examples").rglob("*.yaml"))
        if "\nvariants:" in path.read_text()
    ],
    ids=lambda path: path.stem,
)
def test_every_sweep_of_the_examples_can_be_read(path: Path) -> None:
    sweep = parse_section(SweepConfig, read_mapping(path), str(path))
    for overrides in sweep.variants.values():
        load_config(path.parent / sweep.config, [*sweep.overrides, *overrides, "seed=0"])


def test_a_path_may_follow_the_seed(base: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"data{seed}.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    path = f"data.train.path={tmp_path}/data${{seed}}.jsonl"
    sweep = load_sweep(write_sweep(tmp_path, base, overrides=[path]))
    read = {run.seed: run.config.data.train for run in sweep.runs}
    assert str(read[1]).count("data1.jsonl") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "unknown key 'seed'; did you mean 'seeds'"),
        ({"seeds": []}, "'seeds' "),
        ({"seeds": [1, 1]}, r"'seeds' must be distinct, got \[1, 1\]"),
        ({"seeds": [-1]}, "grpo/seed-1: override 'seed=-1': 'seed' "),
        ({"variants": None}, "variants"),
        ({"variants": {}}, "'variants' "),
        ({"variants": {"a b": []}}, "'variants' must have names .*'a b'"),
        ({"variants": {"..": []}}, "'variants' must have names"),
        ({"variants": {"x": ["run_dir=y"]}}, "'overrides' .*got 'run_dir=y'"),
        ({"config": "none.yaml"}, "grpo/seed0: .*none.yaml: no such file"),
        (
            {"variants": {**VARIANTS, "typo": ["rollout.temprature=1"]}},
            "typo/seed0: override 'rollout.temprature=1': unknown key",
        ),
        (
            {"variants": {**VARIANTS, "wide": ["parallel.tensor=3"]}},
            "wide/seed0: parallel.tensor: must divide the model's",
        ),
        (
            {"ranks": 3, "overrides": ["parallel.tensor=2"]},
            "grpo/seed0: parallel: .* got 2 with 3",
        ),
        ({"overrides": ["eval.sets=[]"]}, "grpo/seed0: eval.sets: "),
        ({"overrides": ["eval.at_end=false"]}, "grpo/seed0: eval.at_end: "),
        (
            {"overrides": ["rollout.engine=sglang", "rollout.servers=['http://a:1']"]},
            "bapo/seed0: rollout.servers: .*grpo/seed0.* got http://a:1",
        ),
    ],
)
def test_what_is_wrong_with_any_run_is_one_line_before_one_starts(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_sweep(tmp_path, base, **changes)
    with pytest.raises(ConfigError, match=message) as refused:
        load_sweep(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "sweep").exists()


def test_runs_one_after_the_other_may_share_servers(base: Path, tmp_path: Path) -> None:
    overrides = ["rollout.engine=sglang", "rollout.servers=['http://a:1']"]
    assert len(load_sweep(write_sweep(tmp_path, base, overrides=overrides, jobs=1)).runs) == 4


def test_a_run_of_other_settings_is_neither_continued_nor_counted(
    base: Path, tmp_path: Path
) -> None:
    path = write_sweep(tmp_path, base)
    for run in load_sweep(path).runs:
        run.run_dir.mkdir(parents=True)
        (run.run_dir / "config.yaml").write_text(dump_yaml(run.config))
    write_sweep(tmp_path, base, overrides=["log.console=false"])  # changes no result
    assert len(load_sweep(path).runs) == 4
    write_sweep(tmp_path, base, overrides=["optimizer.lr=0.5"])
    with pytest.raises(ConfigError, match=r"grpo/seed0: .*/grpo/seed0: .* another optimizer"):
        load_sweep(path)
    for text, place in (("{", "config.yaml:2: "), ("", "yaml: missing key ")):
        (tmp_path / "sweep" / "grpo" / "seed0" / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"{place}.*; or remove .*/grpo/seed0$"):
            load_sweep(path)


def test_gpus_are_divided_among_the_runs_at_a_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_file, "count_gpus", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,3,2,1")
    path = write_sweep(tmp_path, base, ranks=2)
    assert load_sweep(path).gpu_shares == ("7,6", "3,2")
    assert load_sweep(path, is_here=False).gpu_shares == ()
    write_sweep(tmp_path, base, ranks=2, jobs=3)
    with pytest.raises(ConfigError, match=r"'jobs' .* 5 of this machine, got 3 × 2"):
        load_sweep(path)
    servers = ["rollout.engine=sglang", "rollout.server.count=2", "rollout.server.first_gpu=2"]
    write_sweep(tmp_path, base, ranks=2, jobs=1, overrides=servers)
    assert {run.num_gpus for run in load_sweep(path).runs} == {4}
    write_sweep(tmp_path, base, ranks=8, jobs=1, overrides=["rollout.groups_per_step=8"])
    with pytest.raises(ConfigError, match=r"got 1 × 8; .*--slurm"):
        load_sweep(path)


def test_the_sweep_of_the_examples_is_grpo_against_bapo_by_three_seeds(
    base: Path, tmp_path: Path
) -> None:
    example = REPOSITORY / "examples" / "sweep.yaml"
    text = example.read_text().replace("../configs", str(REPOSITORY / "configs"))
    files = base.parent
    there = [
        *(f"model.path={files}/model", f"data.train.path={files}/train.jsonl"),
        f"'eval.sets=[{{path: {files}/heldout.jsonl, name: heldout}}]'",
    ]
    text = text.replace("overrides:\n", "overrides:\n" + "".join(f"  - {o}\n" for o in there))
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("dir: runs/sweep", f"dir: {tmp_path}/runs"))
    sweep = load_sweep(path)
    assert [run.config.algorithm.objective for run in sweep.runs] == ["clip", "bapo"] * 3
    assert {run.ranks for run in sweep.runs} == {1}
