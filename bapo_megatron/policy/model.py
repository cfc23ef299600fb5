"""A model on one rank: its layers, forward passes and export, with or without a training state.

Every method is a collective: all ranks call it, in the same order. Ranks of a tensor group and all
pipeline stages pass the same micro-batches, ranks of a context group their parts of them
(``data.micro_batch``). Their number is equal on all ranks, and with interleaved stages a multiple
of the number of stages.

Messages between pipeline stages have one shape: they are padded to the longest micro-batch and cut
on arrival, so that nothing is computed on padding. ``variable_seq_lengths`` would wait for each
shape on the host, and hangs with interleaved stages.

Shape legend: N = packed tokens of a micro-batch on this rank, M = tokens of the longest one, H =
hidden size, V = columns of the padded vocabulary on this rank, T = response tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
from bapo_megatron.config.schema import OpsConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.ops.chunked import Chunks, OutputHead, Teacher, chunked_logprobs
from bapo_megatron.ops.extension import check_kernels
from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from bapo_megatron.policy import weight_export
from bapo_megatron.policy.adapters import adapter_table
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.hf_weights import find_kept, find_tensors, load_weights, local_weights
from bapo_megatron.policy.local_layers import PackedSequences
from bapo_megatron.policy.lora import Lora, load_adapter, write_adapter
from bapo_megatron.policy.megatron_setup import build_chunks, wrap_for_precision
from bapo_megatron.policy.routers import Routers
from bapo_megatron.runtime.distributed import ProcessGroups, fail_together
from bapo_megatron.runtime.files import atomic_directory
from bapo_megatron.types import MicroBatch


@dataclass(eq=False, repr=False)
class Model:
    """This rank's part of a model; ``build`` makes one."""

    hf: HfConfig
    model_dir: Path
    """Source of the config.json and tokenizer of an export."""
    groups: ProcessGroups
    chunks: list[GPTModel]
    """This rank's layers: one GPTModel, or several with interleaved stages."""
    head: OutputHead | None
    """The language-model head, on the last stage of a model that returns hidden states."""
    modules: Sequence[nn.Module]
    """What Megatron's schedule calls: the chunks, wrapped."""
    on_micro_batch: Callable[[], None] = lambda: None
    """Called before a chunk's forward pass of a micro-batch."""
    routers: Routers | None = None
    """Set by ``TrainState`` for a model with experts: only the policy repeats choices."""
    lora: Lora | None = None
    """Adapters, which are trained in place of the weights."""
    finish_weights: Callable[[], None] = lambda: None
    """Waits until every weight is up to date; to be called before weights are read."""

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        parallel: ParallelConfig,
        megatron: MegatronConfig,
        groups: ProcessGroups,
        *,
        returns_hidden_states: bool = False,
    ) -> Self:
        """Build the model that ``model.path`` describes, with its weights.

        With ``returns_hidden_states`` the model ends before its language-model head, which is then
        applied chunk by chunk (``ops.logits_chunk_tokens``).

        Raises:
            ValueError: The model is unusable, or the layout or a setting does not suit it.
        """
        hf = read_hf_config_file(model.path / "config.json", model.ignored_config_fields)
        files, _ = find_tensors(hf, model.path)  # checked before memory is allocated
        chunks = build_chunks(hf, model, parallel, megatron, groups)
        modules = wrap_for_precision(chunks)  # it would round what is loaded before
        load_weights(local_weights(chunks, hf, groups), hf, files, groups)
        has_head = returns_hidden_states and groups.is_last_stage
        head = _take_off_head(chunks[-1], groups.tensor) if has_head else None
        built = cls(hf, model.path, groups, chunks, head, modules)
        if model.lora.rank:  # after the wrapping, which would round them
            built.lora = Lora.attach(model.lora, chunks, hf, groups, model.path)
            if model.lora.path is not None:
                load_adapter(model.lora.path, built.lora, hf, groups)
        return built

    def gather_weights(self, table: Sequence[Weight] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face tensors with their adapters; see ``weight_export.gather_weights``."""
        local = dict(local_weights(self.chunks, self.hf, self.groups))
        read = weight_export.detached if self.lora is None else self.lora.merged
        return weight_export.gather_weights(local, self.hf, self.groups, table, read)

    def adapter_metrics(self) -> dict[str, float]:
        """Return the metrics ``lora/…``; {} without adapters."""
        if self.lora is None:
            return {}
        self.finish_weights()
        local = local_weights(self.chunks, self.hf, self.groups)
        return self.lora.metrics(local, self.hf, self.groups)

    def gather_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B, float32, under PEFT's names; see ``weight_export.gather_weights``."""
        assert self.lora is not None
        table, local = adapter_table(self.hf, self.lora.config), dict(self.lora.parameters())
        return weight_export.gather_weights(local, self.hf, self.groups, table, dtype=torch.float32)

    def forward_only[Result](
        self, micro_batches: Sequence[MicroBatch], fn: Callable[[Tensor, MicroBatch], Result]
    ) -> list[Result]:
        """Run the model without gradients; return ``fn``'s results on the last stage, elsewhere [].

        ``fn`` is called with the logits [N, V] in the model's dtype (or the hidden states [N, H],
        [N / tensor, H] if sequence-parallel) and the micro-batch, on ``groups.device``; it may
        use collectives of ``groups.tensor``.
        """
        if not micro_batches:
            return []
        with torch.no_grad():
            return self.run_schedule(micro_batches, fn, forward_only=True)

    def export_hf(
        self,
        directory: Path,
        max_file_bytes: int = weight_export.MAX_FILE_BYTES,
        *,
        durable: bool = True,
    ) -> None:
        """Write the weights, config and tokenizer as a Hugging Face model, complete or not at all.

        Rank 0 writes, and replaces an existing ``directory``. When this returns, every rank may
        read the files. With ``durable=False``, as for a weight sync, nothing is flushed, and
        tensors that are not trained (``Family.is_kept``) are left out.

        Raises:
            OSError: ``directory`` cannot be written; raised on every rank.
        """
        self.finish_weights()
        dtype = self.chunks[0].config.params_dtype
        weights = self.gather_weights()

        def write(temporary: Path) -> None:
            kept = find_kept(self.hf, self.model_dir) if durable else {}
            tensors = weight_export.read_kept(kept)
            files = weight_export.plan_files(self.hf, dtype, max_file_bytes, tensors)
            weight_export.write_weights(chain(weights, tensors.items()), files, temporary)
            weight_export.copy_companions(self.model_dir, temporary, dtype)

        self._write_together(write, weights, directory, durable=durable)

    def export_adapter(self, directory: Path, *, durable: bool = True) -> None:
        """Write the adapters as PEFT does, complete or not at all; see ``export_hf``."""
        assert self.lora is not None
        self.finish_weights()
        tensors = self.gather_adapters()
        write = partial(write_adapter, tensors, self.hf, self.lora.config, self.model_dir)
        self._write_together(write, tensors, directory, durable=durable)

    def _write_together(
        self,
        write: Callable[[Path], None],
        gathered: Iterator[object],
        directory: Path,
        *,
        durable: bool,
    ) -> None:
        with fail_together(self.groups):
            try:
                if self.groups.rank == 0:
                    with atomic_directory(directory, durable=durable) as temporary:
                        write(temporary)
            finally:
                # The other ranks take part in every gather, also after a failure.
                for _ in gathered:
                    pass

    def run_schedule(
        self,
        micro_batches: Sequence[MicroBatch],
        on_output: Callable[[Tensor, MicroBatch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's schedule; ``on_output`` sees the last stage's output, [N, V] or [N, H].

        Without ``forward_only`` it returns a loss, its divisor (0-d int32) and a report.
        """
        longest = max(micro_batch.num_tokens for micro_batch in micro_batches)

        def forward_step(
            batches: Iterator[MicroBatch], model: nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch, output = self._forward_chunk(next(batches), model, longest)
            if forward_only and get_attr_wrapped_model(model, "post_process"):
                result = on_output(output.squeeze(0), micro_batch)
                # The schedule keeps its output until the next micro-batch has logits as well.
                return output.new_empty(0), lambda *_, **__: result
            return output, lambda output: on_output(output.squeeze(0), micro_batch)

        if self.routers is not None:
            self.routers.begin_pass(is_loss_pass=not forward_only)
        # Each chunk of an interleaved stage iterates over the micro-batches by itself.
        iterators = [iter(micro_batches) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self.modules),
            num_microbatches=len(micro_batches),
            seq_length=longest * self.groups.context.size(),  # of the messages between stages
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_chunk(
        self, host_batch: MicroBatch, model: nn.Module, longest: int
    ) -> tuple[MicroBatch, Tensor]:
        """Return a micro-batch on the device and a chunk's output for it, padded for sending."""
        self.on_micro_batch()
        transformer = self.chunks[0].config
        # Ranks that divide the tokens of a micro-batch between the matrix products.
        token_ranks = self.groups.tensor.size() if transformer.sequence_parallel else 1
        num_tokens, end = host_batch.num_tokens, int(host_batch.cu_seqlens[-1])
        assert num_tokens % token_ranks == 0, f"{num_tokens} tokens over {token_ranks} ranks"
        assert end == num_tokens * self.groups.context.size(), (
            f"cu_seqlens ends at {end} but the micro-batch has {num_tokens} tokens on each of "
            f"{self.groups.context.size()} ranks; padding must belong to a sequence"
        )
        micro_batch = on_device(host_batch, self.groups.device)
        if self.routers is not None:
            chunk = get_attr_wrapped_model(model, "vp_stage") or 0
            self.routers.begin_micro_batch(micro_batch, chunk)
        decoder = get_attr_wrapped_model(model, "decoder")
        if not decoder.pre_process:  # the previous stage sent [M, 1, H]; cut it to [N, 1, H]
            decoder.set_input_tensor(decoder.input_tensor[: num_tokens // token_ranks])
        # Float16Module would upcast all logits; the log-prob ops read them in the model's dtype.
        options = {"fp32_output": False} if transformer.bf16 else {}
        # On the last stage [1, N, V]: Megatron's layout is [N, 1, V] up to the last transpose,
        # which costs nothing with a batch dimension of 1.
        output = model(
            input_ids=micro_batch.token_ids_N[None],
            position_ids=micro_batch.position_ids_N[None],
            attention_mask=None,
            packed_seq_params=self._packed_seq_params(host_batch, micro_batch),
            **options,
        )
        padding = longest // token_ranks - len(output)
        if padding and not get_attr_wrapped_model(model, "post_process"):
            output = F.pad(output, (0, 0, 0, 0, 0, padding))  # the next stage gets [M, 1, H]
        return micro_batch, output

    def _packed_seq_params(
        self, host_batch: MicroBatch, micro_batch: MicroBatch
    ) -> PackedSequences:
        """Describe the sequences; the host copy has their lengths, so nothing waits for a GPU.

        Megatron keeps a table of rotations for each of the last 32 longest lengths, 32 MB each at
        64k tokens; any upper bound is right, so few different ones are passed.
        """
        lengths = host_batch.cu_seqlens.diff().tolist()
        multiple = math.lcm(4096, 2 * self.groups.context.size())
        max_tokens = -(-max(lengths) // multiple) * multiple
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=micro_batch.cu_seqlens,
            cu_seqlens_kv=micro_batch.cu_seqlens,
            max_seqlen_q=max_tokens,
            max_seqlen_kv=max_tokens,
            lengths=lengths,
        )


@dataclass(eq=False, repr=False)
class PolicyOutput:
    """A model's output as log-probs and entropies of the response tokens.

    The output is logits [N, V], or with ``ops.logits_chunk_tokens`` hidden states [N, H], from
    which logits are computed chunk by chunk.

    Raises:
        ValueError: The kernels were not built for the groups' device.
    """

    ops: OpsConfig
    vocab_size: int
    temperature: float
    """Sampling temperature, by which logits are divided."""
    groups: ProcessGroups
    head: OutputHead | None
    """Set if the model returns hidden states."""

    def __post_init__(self) -> None:
        check_kernels(self.groups.device)

    @classmethod
    def of(cls, model: Model, ops: OpsConfig, temperature: float) -> Self:
        """Return the output of a model, which was built with the same ops section."""
        return cls(ops, model.hf.vocab_size, temperature, model.groups, model.head)

    def read(self, output: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] of the response tokens, without gradient."""
        if self.head is None:
            with torch.no_grad():
                return self.differentiable(output, micro_batch)
        return chunked_logprobs(output, self.chunks(micro_batch))

    def differentiable(self, logits_NV: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] with a graph; their backward pass overwrites the logits."""
        return vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self.temperature,
            group=self.groups.tensor,
            overwrite_logits=True,
        )

    def chunks(
        self, micro_batch: MicroBatch, teacher: Teacher | None = None, head_TK: Tensor | None = None
    ) -> Chunks:
        """Return the response tokens, for hidden states as output."""
        assert self.head is not None
        return Chunks(
            self.head,
            micro_batch.target_T,
            micro_batch.rows_T,
            self.vocab_size,
            self.temperature,
            self.ops.logits_chunk_tokens,
            teacher,
            head_TK,
        )


def _take_off_head(gpt: GPTModel, tensor_group: dist.ProcessGroup) -> OutputHead:
    """Make a last stage's model return the input of its output layer; return that layer's head.

    The model returns [1, N, H] after the final norm, under sequence parallelism this rank's [1, N /
    tensor, H].
    """

    def forward(
        hidden_N1H: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return hidden_N1H, None

    gpt.output_layer.forward = forward
    # ``shared_embedding_or_output_weight`` returns the embedding's even if nothing is shared.
    is_tied = gpt.share_embeddings_and_output_weights
    return OutputHead(
        weight=gpt.shared_embedding_or_output_weight() if is_tied else gpt.output_layer.weight,
        tensor_group=tensor_group,
        sequence_parallel=gpt.config.sequence_parallel,
    )
