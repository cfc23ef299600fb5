"""Compares the loss and gradient of a centred replay with float64 sums over the whole vocabulary.

    python -m bapo_megatron train CONFIG replay=DUMPS model.path=MODEL train.steps=1 \
        algorithm.updates_per_batch=1 algorithm.objective=cispo run_dir=RUN
    python -m tests.benchmarks.centering_parity RUN

Prints both, and exits with 1 if they differ by more than 1e-5 of their size. MODEL is better not
the one that sampled, whose ratios are all 1.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from transformers import AutoModelForCausalLM

from bapo_megatron.telemetry.sinks import read_metrics

BOUNDS = {"reinforce": (1.0, 1.0), "cispo": (0.0, 5.0)}
"""Between which r is the weight of a token."""


def losses(
    row: dict[str, Any], advantage: float, model: Any, bounds: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over a response of −A w_a log p_a, which is reported, and A Σ_v q_v w_v log p_v."""
    prompt, response = row["prompt_token_ids"], torch.tensor(row["response_token_ids"])
    logits = model(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
    log_p = logits.log_softmax(dim=1)
    log_q = log_p.detach().clone()
    ids = torch.tensor(row["sampler_top_ids"]).reshape(len(log_q), -1)
    values = torch.tensor(row["sampler_top_logprobs"], dtype=torch.float64).reshape(ids.shape)
    for q, head, known in zip(log_q, ids, values, strict=True):
        is_tail = torch.ones(len(q), dtype=torch.bool).index_fill(0, head, False)
        q[is_tail] += ((1 - known.exp().sum()) / q[is_tail].exp().sum()).log()
        q[head] = known
    weights = (log_p.detach() - log_q).exp().clamp(*bounds)
    drift = (log_q.exp() * weights * log_p).sum(dim=1)
    chosen = log_p.gather(1, response[:, None])[:, 0]
    ratio = (chosen.detach() - torch.tensor(row["behaviour_logprobs"]).double()).exp()
    return -advantage * (ratio.clamp(*bounds) * chosen).sum(), advantage * drift.sum()


def oracle(rows: Sequence[dict[str, Any]], model: Any, bounds: Any) -> dict[str, float]:
    """Loss and gradient norm of one update on a batch, with GRPO's advantages."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["group_id"]].append(row)
    trained = []
    for group in groups.values():
        rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
        if rewards.min() < rewards.max():
            values = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            trained += zip(group, values.tolist(), strict=True)
    num_tokens = sum(len(row["response_token_ids"]) for row in rows)
    loss = 0.0
    for row, advantage in trained:
        reported, drift = losses(row, advantage, model, bounds)
        ((reported + drift) / num_tokens).backward()
        loss += reported.item() / num_tokens
    squares = (p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    return {"loss/policy": loss, "policy/grad_norm": sum(squares).item() ** 0.5}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare a run's first step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = parser.parse_args(argv).run
    config = yaml.safe_load((run / "config.yaml").read_text())
    path, objective = config["model"]["path"], config["algorithm"]["objective"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    dump = sorted(Path(config["replay"]["dumps"]).glob("step_*.parquet"))[0]
    expected = oracle(pq.read_table(dump).to_pylist(), model, BOUNDS[objective])
    [found, *_] = (row for row in read_metrics(run / "metrics.jsonl") if "loss/policy" in row)
    errors = {key: abs(found[key] / value - 1) for key, value in expected.items()}
    report = {"expected": expected, "found": {key: found[key] for key in expected}} | errors
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(max(errors.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
