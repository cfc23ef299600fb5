"""The only engine of a run, in this process: its model and weight sync.

New weights are copied into the model's parameters, so a failed weight sync may leave only some of
them there; the pool uses the engine again only after a complete one. Adapters are added to the
weights that they change, so that sampling costs as much as with merged ones.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import LocalConfig
from bapo_megatron.engine.base import (
    START_VERSION,
    BucketLayout,
    Capabilities,
    CompletionSink,
    EngineServer,
    GenerateRequest,
    GroupPlace,
    PauseMode,
    Scores,
    Stepper,
)
from bapo_megatron.engine.collective import join_group, start_thread, tensor_sizes, unpack
from bapo_megatron.engine.local.cache import ATTENTION, register_attention
from bapo_megatron.engine.local.decoder import Decoder, Decoding
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.runtime.names import shown
from bapo_megatron.types import FinishReason

ADDRESS = "local"


def load_model(path: Path, dtype: str, device: str) -> tuple[Any, frozenset[int]]:
    """Load a transformers model for sampling; return it and its end-of-sequence tokens."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    register_attention()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        config=transformers.AutoConfig.from_pretrained(path).get_text_config(),
        key_mapping={"^language_model.model": "model"},  # beside Gemma 3's vision tower
        dtype=getattr(torch, dtype),
        attn_implementation=ATTENTION,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {missing[0]}")  # transformers would initialise it randomly
    model.to(device).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Not memory-mapped: results would depend on the alignment of tensors in the file.
        parameter.data = parameter.data.clone()
    for name, module in model.named_modules():
        # transformers fixes 1e-6 for the norms of latents (MLA); SGLang and Megatron use the field.
        if name.endswith(("kv_a_layernorm", "q_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    stop_ids: set[int] = set()
    for source in (model.config, model.generation_config, tokenizer):
        eos = source.eos_token_id
        stop_ids |= set(eos) if isinstance(eos, list) else {eos}
    return model, frozenset(stop_ids - {None})


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that has not ended."""

    sink: CompletionSink
    response: Decoding
    ended: asyncio.Future[None]

    def end(self, error: Exception | None) -> None:
        """Make ``stream`` return, or raise ``error``."""
        self.response.is_cancelled = True
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class LocalEngine:
    """An ``Engine`` around one model; belongs to the event loop that uses it.

    Decode steps, new weights and scoring take turns in one thread; even a cancelled caller waits
    for it. Time limits have no effect.
    """

    address = ADDRESS
    silence_s = 0.0
    """Always 0: there is no other process that could be stuck."""

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        max_rows: int,
        threads: int | None = None,
        sampling_bits: int = 0,
        adapter_scale: float = 1.0,
    ) -> None:
        """Take what ``load_model`` returns, keys of ``LocalConfig``, and alpha / rank."""
        self._model = model
        self._decoder = Decoder(model, stop_ids, max_rows)
        self._cache_tokens = max_rows * model.config.max_position_embeddings
        self.weights = LocalWeights(model, self._change_weights, sampling_bits, adapter_scale)
        self._version = START_VERSION
        self._entries: dict[_OpenRequest, None] = {}
        """In order of arrival."""
        self._arrived: list[Decoding] = []
        self._turn = asyncio.Lock()
        count = threads or torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "local-engine", torch.set_num_threads, (count,))
        self._is_paused = False
        self._is_closed = False
        self.stepper: Stepper | None = self
        """The engine itself: it samples in ``decode`` only."""

    @property
    def num_in_flight(self) -> int:
        return len(self._entries)

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """See ``Engine``; ``decode`` delivers the pieces."""
        where, num_new = f"(request: {request.label})", request.sampling.max_new_tokens
        if self._is_closed:
            raise ServerGoneError(f"{ADDRESS}: closed {where}")
        assert num_new > 0, "a finished response is not continued"
        self._check_tokens(request.input_ids, num_new, where)
        response = Decoding(request)
        entry = _OpenRequest(sink, response, asyncio.get_running_loop().create_future())
        self._entries[entry] = None
        self._arrived.append(response)
        try:
            await entry.ended
        finally:
            del self._entries[entry]
            response.is_cancelled = True

    async def decode(self, max_steps: int) -> int:
        """See ``Stepper``; raise ``RolloutError`` if the model fails, which ends every request."""
        if self._is_paused:
            await asyncio.sleep(0)  # lets others run if called in a loop
            return 0
        async with self._turn:
            arrived, self._arrived = self._arrived, []
            self._decoder.add(arrived)
            self._decoder.drop_cancelled()
            try:
                return await self._compute(lambda: self._decoder.run(max_steps))
            except RolloutError as error:
                self._decoder.clear()
                self._end_all(error)
                raise
            finally:
                for entry in self._open_entries():
                    self._deliver(entry, entry.response.reason)

    async def score(
        self, token_ids: Sequence[int], timeout_s: float, *, start: int = 1, top_k: int = 0
    ) -> Scores:
        """See ``Engine``; no cache is read."""
        self._check_tokens(token_ids, 0, "(log-probs of given tokens)")
        async with self._turn:
            return await self._compute(lambda: self._decoder.score(token_ids, start, top_k))

    async def abort(self, timeout_s: float) -> None:
        """Abort every request, after the running ``decode``."""
        async with self._turn:
            for entry in self._open_entries():
                self._deliver(entry, FinishReason.ABORT)
            self._decoder.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the trainer may use the same GPU

    async def pause(self, mode: PauseMode) -> None:
        """Take no steps until ``resume``; return once the running ``decode`` has ended."""
        assert mode == "retract", "refused by LocalKind.check"
        self._is_paused = True
        async with self._turn:
            self._decoder.retract()

    async def resume(self) -> None:
        self._is_paused = False

    def give_up(self, reason: str) -> None:
        self._end_all(ServerGoneError(f"{ADDRESS}: {reason}"))

    async def version(self, timeout_s: float | None = None) -> str:
        return str(self._version)

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        return Capabilities(
            num_ranks=1,
            methods=frozenset({"broadcast", "disk"}),
            cache_tokens=self._cache_tokens,
        )

    async def check(self) -> None:
        """Do nothing: ``LocalKind.check`` has refused everything unsupported."""

    async def release_memory(self, *_: Any) -> NoReturn:
        """Never called: ``LocalKind`` refuses ``rollout.colocated``."""
        raise NotImplementedError

    take_memory = release_memory

    async def close(self) -> None:
        """End requests in flight; the model can then be freed."""
        self._is_closed = True
        self.give_up("closed")
        async with self._turn:
            self._decoder.clear()
            self.weights.close()
        self._thread.shutdown()

    async def _change_weights(self, change: Callable[[], None], version: int | None) -> None:
        """Load weights in the thread; ``version`` is given with the last part."""
        async with self._turn:
            # Before the change, because a part of the new weights invalidates the cache too.
            self._decoder.retract()
            await self._compute(change)
            if version is not None:
                self._version = version

    def _check_tokens(self, token_ids: Sequence[int], num_new: int, where: str) -> None:
        config = self._model.config
        limit, size = config.max_position_embeddings, config.vocab_size
        if len(token_ids) + num_new > limit:
            raise RolloutError(
                f"{ADDRESS}: {len(token_ids)} input tokens and {num_new} new ones exceed the "
                f"model's context length of {limit} tokens; lower max_response_tokens or "
                f"data.max_prompt_tokens {where}"
            )
        if not token_ids or max(token_ids) >= size:
            raise RolloutError(
                f"{ADDRESS}: input tokens must be below the vocabulary size of {size} {where}; use "
                "the model's own tokenizer"
            )

    def _open_entries(self) -> list[_OpenRequest]:
        return [entry for entry in self._entries if not entry.ended.done()]

    def _deliver(self, entry: _OpenRequest, reason: FinishReason | None) -> None:
        """Pass new tokens to the sink; with a reason they are the last piece."""
        part = entry.response.take(self._version, reason or FinishReason.ABORT)
        try:
            if part.versions and not entry.sink.is_known(self._version):
                raise ServerError(
                    f"{ADDRESS}: sampled with weights version {self._version}, which this run did "
                    "not give it; give each run an engine of its own"
                )
            if part.versions or reason is not None:
                entry.sink.take(part)
        except Exception as error:  # noqa: BLE001 — fails this request only
            entry.end(error)
        else:
            if reason is not None:
                entry.end(None)

    def _end_all(self, error: RolloutError) -> None:
        """End every request with an error; the decoder drops them before its next step."""
        for entry in self._open_entries():
            entry.end(type(error)(f"{error} (request: {entry.response.request.label})"))

    async def _compute[T](self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, even if cancelled; its errors become ``RolloutError``."""
        if self._is_closed:
            raise ServerGoneError(f"{ADDRESS}: closed")
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise
        except RolloutError:
            raise
        except Exception as error:
            remedy = "the end of collector.log says where"
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in str(error):
                remedy = "lower rollout.local.max_rows or max_response_tokens"
            raise RolloutError(f"{ADDRESS}: the model failed ({shown(error)}); {remedy}") from error


class LocalWeights:
    """A ``WeightControl``: this process is one member of a gloo group, on the CPU."""

    def __init__(
        self,
        model: Any,
        change: Callable[[Callable[[], None], int | None], Awaitable[None]],
        bits: int = 0,
        adapter_scale: float = 1.0,
    ) -> None:
        """Take a model, the function that runs a change of its weights, and alpha / rank.

        With ``bits``, round its linear layers now, and new weights of theirs as they arrive.
        """
        self._change = change
        self._scale = adapter_scale
        self._base: dict[str, Tensor] = {}
        """W of the weights that adapters have changed, by name."""
        self._parameters = dict(_weights(model))
        self._bits = bits
        self._rounded = _linear_names(model) if bits else frozenset[str]()
        for name in self._rounded:
            round_rows(self._parameters[name].detach(), bits)
        self._group: Any = None
        self._loaded: set[int] = set()
        """Parameters already loaded by an incomplete weight sync, by ``id``."""

    async def open_session(self, timeout_s: float) -> None:
        """Begin a weight sync; discard an incomplete one."""
        self._loaded.clear()

    async def close_session(self, timeout_s: float) -> None:
        """Do nothing."""

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """See ``WeightControl``; leave the group of an aborted weight sync first."""
        self.close()
        self._group = await _in_thread(
            lambda: join_group(place, timeout_s, timeout_s), "join the group", timeout_s
        )

    async def leave_group(self, name: str, timeout_s: float) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        group, limit = self._group, timedelta(seconds=timeout_s)
        assert group is not None, "join_group comes first"
        flat = torch.empty(sum(tensor_sizes(bucket)), dtype=torch.uint8)
        await _in_thread(
            lambda: group.broadcast(flat, root=0, timeout=limit).wait(limit),
            "receive weights",
            timeout_s,
        )
        tensors, is_last = dict(unpack(bucket, flat)), version is not None
        await self._change(lambda: self._copy(tensors, is_last=is_last), version)

    async def take(self, *_: Any, **__: Any) -> NoReturn:
        """Never called: ``LocalKind`` refuses ``rollout.weight_sync.method: tensor``."""
        raise NotImplementedError

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        def read() -> None:
            tensors: dict[str, Tensor] = {}
            for path in sorted(model_dir.glob("*.safetensors")):
                try:
                    tensors |= load_file(path)  # mapped, not read
                except (OSError, SafetensorError) as error:
                    raise RolloutError(
                        f"local: cannot read the weights in '{path}' ({error}); save them again"
                    ) from error
            if not tensors:
                raise RolloutError(f"local: '{model_dir}' has no *.safetensors; save weights there")
            self._loaded.clear()
            self._copy(tensors, is_last=True)

        await self._change(read, version)

    async def flush_idle(self, timeout_s: float) -> None:
        """Do nothing."""

    def _copy(self, tensors: Mapping[str, Tensor], *, is_last: bool) -> None:
        """Copy tensors into the model, or add adapters; nothing if one is not the model's."""
        is_adapter = all(name.startswith(_PEFT_PREFIX) for name in tensors)
        tensors = {_name_here(name): tensor for name, tensor in tensors.items()}
        if is_adapter:
            self._add(tensors)
            return
        for name, tensor in tensors.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                rule = "is not the model's" if parameter is None else f"must be {parameter.shape}"
                raise RolloutError(
                    f"local: weight '{name}' {rule}, got {tensor.shape}; send weights of the model "
                    "in model.path"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._parameters[name].copy_(tensor)
                if name in self._rounded:
                    round_rows(self._parameters[name], self._bits)
                self._loaded.add(id(self._parameters[name]))
        if not is_last:
            return
        missing = [n for n, value in self._parameters.items() if id(value) not in self._loaded]
        if missing:
            raise RolloutError(
                f"local: the new weights lack '{missing[0]}' ({len(missing)} in all); send all "
                "weights of the model in model.path"
            )
        self._loaded.clear()
        self._base.clear()

    def _add(self, adapter: Mapping[str, Tensor]) -> None:
        """Set each weight W [O, I] that has an A [r, I] and a B [O, r] to W + α/r · B A."""
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in dict.fromkeys(name.rpartition("lora_")[0] for name in adapter):
            name = f"{layer}weight"
            weight = self._parameters.get(name)
            a_rI, b_Or = (adapter.get(f"{layer}lora_{part}.weight") for part in "AB")
            shape = None if weight is None else tuple(weight.shape)
            if a_rI is None or b_Or is None or shape != (len(b_Or), a_rI.shape[1]):
                raise RolloutError(
                    f"local: the adapter of '{name}' must be an A and a B that fit a weight of the "
                    "model, got others; send an adapter of the model in model.path"
                )
            pairs[name] = a_rI, b_Or
        if missing := self._base.keys() - pairs.keys():
            raise RolloutError(
                f"local: the adapter must change '{min(missing)}', as an earlier one did, got "
                f"{len(pairs)} others; send A and B of each linear that it adapts"
            )
        with torch.no_grad():
            for name, (a_rI, b_Or) in pairs.items():
                parameter = self._parameters[name]
                if name not in self._base:
                    self._base[name] = parameter.clone()
                base = self._base[name]
                factors = (self._scale * b_Or.float()).to(base.device), a_rI.float().to(base.device)
                parameter.copy_(torch.addmm(base.float(), *factors))


_PEFT_PREFIX = "base_model.model."
"""Begins the names of A and B."""


def _name_here(name: str) -> str:
    """Return the model's name of a tensor that Hugging Face's, or PEFT's, name describes.

    A language model is loaded without its vision tower's part of the names; transformers has
    another name for Nemotron-H's backbone, too.
    """
    name = name.removeprefix(_PEFT_PREFIX).removeprefix("language_model.")
    return name.replace(".language_model.", ".", 1).replace("backbone.", "model.", 1)


_IN_FILES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What files of MiniMax-M2 call parts of names."""


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what weights are copied to, by the names in files; tied ones under each of theirs.

    transformers keeps the experts of a layer in two tensors, [E, 2 · channels, D] of gate and up
    and [E, D, channels]; files have three matrices per expert, without a gate two, but gpt-oss's
    have the same tensors.
    """
    in_files = _IN_FILES if model.config.model_type == "minimax_m2" else {}
    for name, tensor in _matrices(model):
        yield ".".join(in_files.get(part, part) for part in name.split(".")), tensor


def _matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        layer, is_expert, kind = name.partition(".experts.")
        if not is_expert or f"{layer}.experts.down_proj_bias" in state:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor.detach()):
            parts = [(kind, expert)]
            if kind == "gate_up_proj":
                parts = list(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, matrix in parts:
                yield f"{layer}.experts.{number}.{part}.weight", matrix


def _linear_names(model: Any) -> frozenset[str]:
    """Names of the matrices of linear layers and experts, without the output layer."""
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }
    return frozenset(
        name
        for name, _ in _weights(model)
        if name in linear or (".experts." in name and not name.endswith("_bias"))
    )


def round_rows(matrix: Tensor, bits: int) -> None:
    """Round [out, in] to ``bits``-bit integers times one scale per row, in place.

    Symmetric: the largest absolute value of a row becomes ±(2^(bits − 1) − 1). The experts of
    gpt-oss are [E, in, out].
    """
    matrix = matrix.mT if matrix.dim() == 3 else matrix
    values = matrix.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    matrix.copy_((values / scale.clamp(min=1e-30)).round_() * scale)


async def _in_thread[T](operation: Callable[[], T], what: str, timeout_s: float) -> T:
    """Run a collective in a thread that is abandoned after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(start_thread(operation, "local-weights"))
    except TimeoutError as error:
        raise ServerGoneError(f"local: could not {what} within {timeout_s:g} s") from error
    except RuntimeError as error:
        raise RolloutError(f"local: could not {what} ({error}); see rank 0's error") from error


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A ``Backend`` without servers."""

    model: ModelConfig
    local: LocalConfig
    device: str
    """``cuda`` (the current device) or ``cpu``."""

    servers: ClassVar[Sequence[EngineServer]] = ()
    """None: the model is in this process."""

    def addresses(self) -> Sequence[str]:
        return (ADDRESS,)

    async def connect(self, address: str) -> LocalEngine:
        try:
            model, stop_ids = await asyncio.to_thread(
                load_model, self.model.path, self.model.dtype, self.device
            )
        # Missing, unusable or damaged files: transformers may raise anything.
        except Exception as error:
            raise RolloutError(
                f"model.path: transformers cannot load '{self.model.path}' ({shown(error)}); "
                "download or save the model again, or free memory"
            ) from error
        local, lora, bits = self.local, self.model.lora, self.local.sampling_bits or 0
        scale = lora.alpha / max(lora.rank, 1)
        return LocalEngine(model, stop_ids, local.max_rows, local.threads, bits, scale)
