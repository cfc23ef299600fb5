"""The figures in docs/scaling.md are those that the command prints."""

import re

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.runtime.gpus import GPUS
from bapo_megatron.tools.planning.memory import layer_parameters
from bapo_megatron.tools.planning.plan import Plan, PlanOptions, make_plan
from tests.launch import REPOSITORY
from tests.tools.planning.cases import QWEN3_SHAPES, published
from tests.tools.planning.one_gpu import CARDS, row

DISK = "rollout.weight_sync.method=disk"
TEXT = " ".join((REPOSITORY / "docs" / "scaling.md").read_text().split())

REPRODUCE = " ".join((REPOSITORY / "docs" / "reproduce.md").read_text().split())


def model_of(name: str) -> HfConfig:
    """The model of a file in configs/."""
    return published(f"deepseek-r1-distill-qwen-{'32b' if '32b' in name else '7b'}")


def shipped(name: str, options: PlanOptions, *overrides: str) -> Plan:
    """The plan of a file in configs/."""
    config = load_config(REPOSITORY / "configs" / f"{name}.yaml", overrides)
    return make_plan(config, model_of(name), options)


def plan_7b(gpus: int = 4, *overrides: str, local: bool = False) -> Plan:
    layers = "local" if local else "transformer-engine"
    return shipped(
        "r1-distill-qwen-7b-8k", PlanOptions(trainer_gpus=gpus, layers=layers), *overrides
    )


def plan_32b(options: PlanOptions | None = None, *overrides: str) -> Plan:
    return shipped("bp-math-32b-64k", options or PlanOptions(trainer_gpus=128), *overrides)


def test_the_memory_table_is_that_of_the_plan() -> None:
    plan = plan_32b()
    memory = plan.stages[0]
    assert f"= {memory.parameters:,} |" in TEXT
    assert f"· {layer_parameters(model_of(plan.name), 0, plan.layout.tensor):,} +" in TEXT
    for name in ("weights", "gradients", "optimizer", "activations", "total"):
        value = getattr(memory, f"{name}_bytes")
        rows = [row for row in TEXT.split(" | | ") if row.startswith(f"{name} |")]
        rows += [f"{name} |" + part for part in TEXT.split(f"| {name} |")[1:]]
        assert any(row.split("|")[2].strip() == f"{value / 1e9:.1f}" for row in rows), name


def test_the_phase_table_is_that_of_the_plan() -> None:
    plan = plan_32b()
    table = TEXT.split(f"| phase ({plan.layout.gpus} + {plan.layout.gpus} H100)")[1]
    for phase in plan.phases:
        row = table.split(f"| {phase.name}")[1].split("| |")[0].split(" |")
        seconds = f"{phase.seconds:,.0f}" if phase.seconds >= 1 else f"{phase.seconds:.2f}"
        assert seconds in [cell.strip() for cell in row], phase.name


@pytest.mark.exhaustive
def test_single_figures_in_the_text_are_those_of_the_plan() -> None:
    def gb(plan: Plan) -> str:
        return f"{plan.worst_stage.total_bytes / 1e9:.1f}"

    full = plan_32b(PlanOptions(trainer_gpus=128), "megatron.recompute=full")
    rollout, _, training = plan_7b().phases[:3]
    tokens_per_s = plan_7b().rollout_tokens_per_s
    for sentence in (
        f"a GPU needs {gb(plan_7b())} GB, with `recompute=full` "
        f"{gb(plan_7b(4, 'megatron.recompute=full'))} GB, without Transformer Engine "
        f"{gb(plan_7b(local=True))} GB.",
        f"the rollout takes {rollout.seconds:.0f} s at {tokens_per_s:,.0f} tokens/s per GPU, "
        f"training {training.seconds:.0f} s.",
        f"{plan_7b().step_s:.0f} s per step",
        f"by disk {plan_32b(None, DISK).phases[-1].seconds:.0f} s",
        f"The last stage needs {plan_32b().stages[1].total_bytes / 1e9:.1f} GB. "
        f"`parallel.pipeline=1` needs {gb(plan_32b(None, 'parallel.pipeline=1'))}"
        " GB",
        f"needs {gb(full)} GB and {full.phases[2].seconds:.0f} s instead of "
        f"{plan_32b().phases[2].seconds:.0f}",
        "with `--response-tokens 16000` "
        f"{plan_32b(PlanOptions(trainer_gpus=128, response_tokens=16000)).step_s:.0f} s instead of "
        f"{plan_32b().step_s:,.0f}",
        f"takes {plan_32b(PlanOptions(gpus=256, trainer_gpus=64)).step_s:,.0f} s, 128 and 128 "
        f"take {plan_32b().step_s:,.0f} s",
        f"a checkpoint has {plan_32b().disk[0].each_bytes / 1e9:.0f} GB, a step's dump "
        f"{plan_32b().disk[2].each_bytes / 1e9:.1f} GB and the export "
        f"{plan_32b().disk[3].each_bytes / 1e9:.0f} GB; 1,000 steps fill "
        f"{sum(use.total_bytes for use in plan_32b().disk) / 1e12:.1f} TB",
        f"{plan_32b().rollout_tokens_per_s:,.0f} tokens/s per GPU",
    ):
        assert sentence in TEXT, sentence


@pytest.mark.parametrize(
    ("row", "name", "gpus", "response"),
    [
        ("| 7B BAPO | 32 + 32 | 32,768", "bp-math-7b-64k", 32, 32768),
        ("| | | 16,000", "bp-math-7b-64k", 32, 16000),
        ("| 7B GRPO | 32 + 32 | 32,768", "bp-math-7b-64k", 32, 32768),
        ("| 32B BAPO | 128 + 128 | 32,768", "bp-math-32b-64k", 128, 32768),
        ("| | | 16,000", "bp-math-32b-64k", 128, 16000),
        ("| 32B GRPO | 128 + 128 | 32,768", "bp-math-32b-64k", 128, 32768),
        ("| R1-Distill-7B, BAPO at 2× | 16 + 16 | 4,096", "r1-distill-qwen-7b-8k", 16, 4096),
        ("| R1-Distill-7B, BAPO at 4× | 16 + 16 | 4,096", "r1-distill-qwen-7b-8k", 16, 4096),
    ],
)
def test_the_costs_of_the_papers_runs_are_those_of_the_plan(
    row: str, name: str, gpus: int, response: int
) -> None:
    overrides = ["algorithm.objective=clip"] if "GRPO" in row else []
    for updates in (2, 4):
        if f"{updates}×" in row:
            overrides += [f"algorithm.updates_per_batch={updates}"]
            overrides += [f"rollout.groups_per_step={64 * updates}"]
    plan = shipped(name, PlanOptions(trainer_gpus=gpus, response_tokens=response), *overrides)
    hours = plan.gpu_hours_per_step * 1000
    assert f"{row} | {plan.step_s:,.0f} | {hours:,.0f} |" in REPRODUCE
    assert plan.steps == 1000
    assert plan.fits


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        size if size == "1.7B" else pytest.param(size, marks=pytest.mark.exhaustive)
        for size in QWEN3_SHAPES
    ],
)
def test_the_table_of_one_gpu_is_what_init_chooses(size: str) -> None:
    page = (REPOSITORY / "docs" / "benchmarks" / "init_one_gpu_202611.md").read_text()
    rows = [row(size, card, mode) for card in CARDS for mode in ("full", "lora")]
    assert rows == [line for line in page.splitlines() if line.startswith(f"| {size} |")]


@pytest.mark.parametrize("name", ["one-gpu-qwen3-4b", "one-gpu-qwen3-4b-lora"])
@pytest.mark.parametrize("column", range(4))
def test_the_peaks_of_the_files_for_one_gpu_are_those_of_the_plan(name: str, column: int) -> None:
    file = REPOSITORY / "configs" / f"{name}.yaml"
    card = GPUS[CARDS[column]]
    advice = re.search(rf"^#   {card.memory_gb} GB: (.+(\n#     .+)*)$", file.read_text(), re.M)
    config = load_config(file, advice[1].replace("#", "").split() if advice else [])
    plan = make_plan(config, published("qwen3-4b"), PlanOptions(gpus=1, gpu=card.name))
    cell = TEXT.split(f"[`{name}.yaml`](../configs/{name}.yaml) | ")[1].split(" |")[column].strip()
    stage = plan.worst_stage
    if not plan.fits:
        kept = stage.weights_bytes + stage.gradients_bytes
        assert cell == f"no: weights and gradients alone take {kept / 1e9:.1f}"
        assert f"alone take {kept / 1e9:.1f} GB" in file.read_text()
    else:
        assert cell == f"{stage.total_bytes / 1e9:.1f}, {plan.sampling_bytes / 1e9:.1f}"
    assert plan.fits or (name, column) == ("one-gpu-qwen3-4b", 0)
