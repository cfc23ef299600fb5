"""New weights for the model in this process, from rank 0's group or from a directory.

Weights are copied into the model's own parameters, so a failed push may leave a part of them there:
then nothing is sampled until a whole push has come.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.engine.collective import join_group, start_thread, tensor_sizes, unpack
from bapo_megatron.errors import RolloutError, ServerGoneError


class LocalWeights:
    """A ``WeightControl``: this process is one member of the group, on the CPU by gloo."""

    tensor_ranks = 1

    def __init__(
        self, model: Any, change: Callable[[Callable[[], None], int | None], Awaitable[None]]
    ) -> None:
        """Take a model, and what runs a change of its weights and labels it with a version."""
        self._change = change
        # Tied parameters under each of their names.
        self._parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._group: Any = None
        self._loaded: set[int] = set()
        """Parameters of a push that is not complete, by ``id``."""
        self._is_whole = True

    def require_whole(self) -> None:
        """Refuse to compute with a part of new weights, by a ``RolloutError``."""
        if not self._is_whole:
            raise RolloutError(
                "local: holds a part of new weights; see why the push failed, and continue with "
                "resume=true"
            )

    async def open_session(self, timeout_s: float) -> None:
        """Begin a push; one that was not completed is forgotten."""
        self._loaded.clear()

    async def close_session(self, timeout_s: float) -> None:
        """Do nothing."""

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """See ``WeightControl``; the group of a push that was broken off is left."""
        self.close()
        self._group = await _in_thread(
            lambda: join_group(place, timeout_s, timeout_s), "join the group", timeout_s
        )

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """See ``WeightControl``."""
        self.close()

    def close(self) -> None:
        """Leave the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        """See ``WeightControl``."""
        group = self._group
        assert group is not None, "join_group comes first"
        flat = torch.empty(sum(tensor_sizes(bucket)), dtype=torch.uint8)
        limit = timedelta(seconds=timeout_s)
        await _in_thread(
            lambda: group.broadcast(flat, root=0, timeout=limit).wait(limit),
            "receive weights",
            timeout_s,
        )
        self._check_shapes(dict(zip(bucket.names, bucket.shapes, strict=True)))
        await self._change(
            lambda: self._copy(unpack(bucket, flat), is_last=version is not None), version
        )

    async def take(self, *_: Any, **__: Any) -> NoReturn:
        """Never called: the kind refuses ``rollout.weight_sync.method: tensor``."""
        raise NotImplementedError

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        """See ``WeightControl``."""

        def read() -> None:
            paths = sorted(model_dir.glob("*.safetensors"))
            if not paths:
                raise RolloutError(f"local: '{model_dir}' has no *.safetensors; save weights there")
            try:
                with ExitStack() as stack:
                    files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
                    file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 — not a mapping
                    self._check_shapes(
                        {n: tuple(file.get_slice(n).get_shape()) for n, file in file_of.items()}
                    )
                    self._loaded.clear()
                    tensors = ((name, file.get_tensor(name)) for name, file in file_of.items())
                    self._copy(tensors, is_last=True)
            except (OSError, SafetensorError) as error:
                raise RolloutError(
                    f"local: cannot read the weights in '{model_dir}' ({error}); save them again"
                ) from error

        await self._change(read, version)

    async def flush_idle(self, timeout_s: float) -> None:
        """Do nothing."""

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
        missing = [name for name, own in self._parameters.items() if id(own) not in self._loaded]
        if missing:
            raise RolloutError(
                f"local: the new weights lack '{missing[0]}' ({len(missing)} in all); push all "
                "weights of the model in model.path"
            )
        self._loaded.clear()
        self._is_whole = True


async def _in_thread[T](operation: Callable[[], T], what: str, timeout_s: float) -> T:
    """Run a collective in a thread, which is abandoned if it takes longer.

    Raises:
        RolloutError: It failed.
        ServerGoneError: It took longer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(start_thread(operation, "local-weights"))
    except TimeoutError as error:
        raise ServerGoneError(f"local: could not {what} within {timeout_s:g} s") from error
    except RuntimeError as error:
        raise RolloutError(f"local: could not {what} ({error}); see rank 0's error") from error
