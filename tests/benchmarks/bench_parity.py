"""Log-probs of real text by everything that computes them: trainer, engines and transformers.

    examples/smollm/run.sh .venv/bin/python 0
    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_parity runs/smollm2/model \\
        runs/smollm2-135m-seed0/rollouts/step_000001.parquet --out docs/benchmarks/NAME

Prompts and responses of a dump, whole; every token but the first is scored at T = 1. The trainer
runs in each layout that fits the model; the others are compared with it on one rank.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.data.dump import read_batch
from bapo_megatron.engine.local.engine import LocalEngine, load_model
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.trainer.recompute import score_probes
from tests.benchmarks.harness import columns, finish, machine, page, report_arguments
from tests.distributed_launch import joined, run_ranks
from tests.engine.sglang.servers import KEYS, connected, running, server_config
from tests.trainer.one_update import Case, build_trainer

ONE_RANK = "trainer, one rank"
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    ONE_RANK: (1, {}, {}),
    "trainer, chunked logits": (1, {}, {"logits_chunk_tokens": 256}),
    "trainer, PP 2": (2, {"pipeline": 2}, {}),
    "trainer, PP 2 × VPP 3": (2, {"pipeline": 2, "virtual_pipeline": 3}, {}),
    "trainer, CP 2": (2, {"context": 2}, {}),
    "trainer, TP 3, SP": (3, {"tensor": 3, "sequence": True}, {}),
}
"""Ranks, sizes and ``ops`` of each."""

COLUMNS = {"": "{by}", "dtype": "{dtype}", "mean": "{mean:.2g}", "largest": "{max:.2g}"}

Sequences = Sequence[Sequence[int]]


def score_in_layout(
    model: Path, dtype: str, sizes: dict[str, Any], ops: dict[str, Any], sequences: Sequences
) -> np.ndarray | None:
    """By the trainer; on rank 0 of the layout."""
    with joined(**sizes) as groups:
        case = Case(ops=ops, budget=2048, dtype=dtype)
        trainer = build_trainer(model, groups, case, sizes=sizes, optimizer={"lr": 0.0})
        scored = score_probes(trainer.state.model, trainer.ops, trainer.shape, sequences)
    return None if scored is None else np.concatenate([*map(np.array, scored)])


def score_by_transformers(model: Path, dtype: str, sequences: Sequences) -> np.ndarray:
    """By a forward pass of transformers; float32 log-softmax."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    scored = []
    with torch.inference_mode():
        for token_ids in sequences:
            tokens = torch.tensor([token_ids])
            logprob_TV = loaded(tokens).logits[0, :-1].float().log_softmax(dim=-1)
            scored.append(logprob_TV.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    return np.concatenate(scored)


async def score_by_engine(engine: LocalEngine | SglangClient, sequences: Sequences) -> np.ndarray:
    """By an engine's own call."""
    return np.concatenate([(await engine.score(tokens, 300)).logprobs for tokens in sequences])


def score_by_local(model: Path, dtype: str, sequences: Sequences) -> np.ndarray:
    """By the local engine."""

    async def run() -> np.ndarray:
        engine = LocalEngine(*load_model(model, dtype, "cpu"), max_rows=8)
        return await score_by_engine(engine, sequences)

    return asyncio.run(run())


def score_by_sglang(model: Path, dtype: str, sequences: Sequences) -> np.ndarray:
    """By a server on the CPU."""

    async def run(address: str) -> np.ndarray:
        async with connected(address, KEYS) as client:
            return await score_by_engine(client, sequences)

    with tempfile.TemporaryDirectory() as directory:
        server = {"max_total_tokens": 8192}
        config = server_config(model, Path(directory), dtype=dtype, server=server)
        with running(SglangServer(config, "cpu", KEYS)) as started:
            return asyncio.run(run(started.address))


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("dump", type=Path, help="rollouts/step_NNNNNN.parquet of a run")
    parser.add_argument("--responses", type=int, default=64)
    options = parser.parse_args()
    samples = read_batch(options.dump).samples[: options.responses]
    sequences = [
        np.concatenate([s.prompt.token_ids, s.response_token_ids]).tolist() for s in samples
    ]
    rows, num_tokens = [], sum(len(tokens) - 1 for tokens in sequences)
    for dtype in ("float32", "bfloat16"):
        scored: dict[str, np.ndarray] = {}
        for name, (ranks, sizes, ops) in LAYOUTS.items():
            of_ranks = run_ranks(
                score_in_layout, ranks, options.model, dtype, sizes, ops, sequences, timeout_s=500
            )
            scored[name] = of_ranks[0]
        scored["transformers"] = score_by_transformers(options.model, dtype, sequences)
        scored["local engine"] = score_by_local(options.model, dtype, sequences)
        scored["SGLang"] = score_by_sglang(options.model, dtype, sequences)
        for name, values in scored.items():
            gap = np.abs(values - scored[ONE_RANK])
            rows.append(
                {"dtype": dtype, "by": name, "mean": float(gap.mean()), "max": float(gap.max())}
            )
            sys.stderr.write(f"{rows[-1]}\n")
    where = machine()
    text = page(
        "Log-probs of real text by everything that computes them",
        where,
        f"{len(sequences)} sequences, {num_tokens:,} tokens.",
        columns(rows, COLUMNS),
    )
    finish(options.out, text, {"machine": where, "tokens": num_tokens, "rows": rows})


if __name__ == "__main__":
    main()
