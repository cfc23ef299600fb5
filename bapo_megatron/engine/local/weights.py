"""New weights for the model in this process, from rank 0's group or from a directory.

Weights are copied into the model's own parameters, so a part of them may be there when a push
fails: then nothing is sampled until a whole push has come.
"""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from bapo_megatron.errors import RolloutError, ServerGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from bapo_megatron.engine.base import BucketLayout, GroupPlace
    from bapo_megatron.engine.local.engine import LocalEngine


class LocalWeights:
    """A ``WeightControl``: this process is one member of the group, on the CPU by gloo."""

    def __init__(self, engine: LocalEngine, model: Any) -> None:
        """Nothing is opened.

        Args:
            engine: Its ``change_weights`` orders loading with what is computed.
            model: Of transformers.
        """
        self._engine = engine
        # Tied parameters under each of their names.
        self._parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._groups: dict[str, Any] = {}  # torch's stubs lack the collectives of a backend
        self._loaded: set[int] = set()
        """Parameters of a push that is not complete, by ``id``."""
        self._is_whole = True

    @property
    def tensor_ranks(self) -> int:
        """Ranks that join a group."""
        return 1

    def require_tensor_ranks_only(self) -> None:
        """It has no other ranks."""

    def require_whole(self) -> None:
        """Refuse to compute with a part of new weights.

        Raises:
            RolloutError: The last push is not complete.
        """
        if not self._is_whole:
            raise RolloutError(
                "local: holds a part of new weights; see why the push failed, and continue with "
                "resume=true"
            )

    async def open_session(self, timeout_s: float) -> None:
        """Begin a push; one that was not completed is forgotten."""
        self._loaded.clear()

    async def close_session(self, timeout_s: float) -> None:
        """Nothing is left to do."""

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Join rank 0's group; see ``weight_sync.collective_group`` for where members meet."""
        if place.backend != "gloo":
            raise RolloutError(
                "rollout.weight_sync.backend: must be gloo with the engine local, got "
                f"{place.backend}: NCCL has no two ranks on one GPU; set it"
            )
        limit = timedelta(seconds=timeout_s)

        def meet() -> Any:
            store: Store = TCPStore(place.master_address, place.master_port, timeout=limit)
            for prefix in (place.name, f"{place.name}/", "cpu/"):
                store = PrefixStore(prefix, store)
            group = ProcessGroupGloo(store, place.first_rank, place.world_size, limit)
            group._set_sequence_number_for_group()
            return group

        self._groups[place.name] = await _in_thread(meet, "join the group", timeout_s)

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Forget a group."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.shutdown()

    async def receive(
        self,
        bucket: BucketLayout,
        group_name: str,
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Receive a bucket and load it; keys and values are forgotten in any case."""
        group = self._groups.get(group_name)
        if group is None:
            raise RolloutError(f"local: has not joined the group '{group_name}'; push again")
        dtypes = [getattr(torch, name) for name in bucket.dtypes]
        sizes = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(bucket.shapes, dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        limit = timedelta(seconds=timeout_s)
        await _in_thread(
            lambda: group.broadcast(flat, root=0, timeout=limit).wait(limit),
            "receive weights",
            timeout_s,
        )
        parts = flat.split(sizes)  # type: ignore[no-untyped-call]
        tensors = {
            name: part.view(dtype).view(shape)
            for name, part, dtype, shape in zip(
                bucket.names, parts, dtypes, bucket.shapes, strict=True
            )
        }
        self._check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        await self._engine.change_weights(
            lambda: self._copy(tensors.items(), is_last=version is not None), version
        )

    async def take(
        self,
        payloads: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Refuse: weights come through a group or a directory."""
        raise RolloutError(
            "rollout.weight_sync.method: must be broadcast or disk with the engine local, got "
            "tensor; set it"
        )

    async def load(
        self, model_dir: Path, *, version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """Load a Hugging Face directory."""

        def read() -> None:
            files = sorted(model_dir.glob("*.safetensors"))
            if not files:
                raise RolloutError(f"local: '{model_dir}' has no *.safetensors; save weights there")
            try:
                for path in files:
                    with safe_open(path, "pt") as file:
                        names = list(file.keys())
                        self._check_shapes(
                            {name: tuple(file.get_slice(name).get_shape()) for name in names}
                        )
                self._loaded.clear()
                for path in files:
                    with safe_open(path, "pt") as file:
                        tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 — not a mapping
                        self._copy(tensors, is_last=path == files[-1])
            except (OSError, SafetensorError) as error:
                raise RolloutError(
                    f"local: cannot read the weights in '{model_dir}' ({error}); save them again"
                ) from error

        await self._engine.change_weights(read, version)

    async def flush_idle(self, timeout_s: float) -> None:
        """Nothing of old weights is ever kept."""

    def close(self) -> None:
        """Leave all groups."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.shutdown()

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                raise RolloutError(
                    f"local: the model has no weight '{name}'; push weights of the model in "
                    "model.path"
                )
            if tuple(parameter.shape) != shape:
                raise RolloutError(
                    f"local: weight '{name}' must have the shape {list(parameter.shape)}, got "
                    f"{list(shape)}; push weights of the model in model.path"
                )

    def _copy(self, tensors: Iterable[tuple[str, Tensor]], *, is_last: bool) -> None:
        """Copy tensors whose names and shapes are right into the model."""
        self._is_whole = False
        with torch.no_grad():
            for name, tensor in tensors:
                self._parameters[name].copy_(tensor)
                self._loaded.add(id(self._parameters[name]))
        if not is_last:
            return
        loaded = self._loaded
        missing = [name for name, own in self._parameters.items() if id(own) not in loaded]
        if missing:
            raise RolloutError(
                f"local: the new weights lack '{missing[0]}' ({len(missing)} in all); push all "
                "weights of the model in model.path"
            )
        loaded.clear()
        self._is_whole = True


async def _in_thread(operation: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Run what nothing can interrupt, and has a time limit of its own, in a thread that is left.

    Raises:
        RolloutError: It failed.
        ServerGoneError: It took longer.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            result.set_result(operation())
        except Exception as error:  # noqa: BLE001 — whatever it is, who waits gets it
            result.set_exception(error)

    threading.Thread(target=run, name="local-weights", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(result)
    except TimeoutError as error:
        raise ServerGoneError(f"local: could not {what} within {timeout_s:g} s") from error
    except RuntimeError as error:
        raise RolloutError(f"local: could not {what} ({error}); see rank 0's error") from error
