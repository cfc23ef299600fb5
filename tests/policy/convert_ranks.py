"""What the ranks of test_convert.py do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch import Tensor

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint import CheckpointSaver
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from tests.distributed_launch import joined
from tests.policy.convert_models import run_convert
from tests.policy.parity_ranks import build, snapshot
from tests.policy.tiny_models import Models

ONE: dict[str, dict[str, Any]] = {"single": {}}
TWO: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
}


def run_layouts(
    layouts: dict[str, dict[str, Any]],
    models: Models,
    converted: Models,
    root: Path,
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Load what was converted into each layout; save changed weights in each layout."""
    loaded: dict[tuple[str, str], dict[str, Tensor]] = {}
    for layout, sizes in layouts.items():
        with joined(**sizes) as groups:
            for name, model in models.items():
                policy = build(model, groups)
                _load(policy, converted[name])
                loaded[name, layout] = snapshot(policy)
                _change_and_save(policy, model, root / layout / name)
                if (name, layout) == ("qwen3", "single"):
                    _save_layer_by_layer(policy, root / "layer by layer")
    return loaded


def _save_layer_by_layer(policy: MegatronPolicy, directory: Path) -> None:
    directory.mkdir()
    (chunk,) = policy.chunks
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    dist_checkpointing.save(state, str(directory))


def peak_growth_bytes(small: Path, large: Path, scratch: Path, max_file_bytes: int) -> list[int]:
    """How far memory grows beyond what a small model takes, in both directions."""
    growth = []
    for name, model in (("small", small), ("large", large)):
        for source, target in ((model, scratch / name), (scratch / name, scratch / f"{name} back")):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = _peak_bytes()
            run_convert(source, target, max_file_bytes=max_file_bytes)
            growth.append(_peak_bytes() - before)
    return growth[2:]


def _load(policy: MegatronPolicy, checkpoint: Path) -> None:
    """Overwrite all weights with those of a checkpoint, as any user of Megatron-core would."""
    for number, chunk in enumerate(policy.chunks):
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
        state = {"model": chunk.sharded_state_dict()}
        loaded = dist_checkpointing.load(
            state, str(checkpoint), validate_access_integrity=len(policy.chunks) == 1
        )
        assert loaded["checkpoint_version"] == 3.0, number
        chunk.load_state_dict(loaded["model"])
    policy.optimizer.reload_model_params()


def _change_and_save(policy: MegatronPolicy, model: Path, run: Path) -> None:
    """A run directory with a checkpoint of other weights than the model's, and their export."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.mul_(1.5)
    policy.optimizer.reload_model_params()
    CheckpointSaver(run / "checkpoints", CheckpointConfig()).save(1, policy, {})
    policy.export_hf(run / "export")
    if policy.groups.rank == 0:
        (run / "config.yaml").write_text(f"model:\n  path: {model}\n")


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmHWM")
