"""Samples, problems and results for tests."""

import asyncio
from typing import Any

from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.evaluation.results import summarise
from bapo_megatron.evaluation.samples import EvalSample
from bapo_megatron.reward.base import Score
from bapo_megatron.types import EvalResult, FinishReason


def sample(prompt_id: str = "a:0", index: int = 0, **fields: Any) -> EvalSample:
    """A right answer of ten tokens, unless ``fields`` say otherwise."""
    return EvalSample(
        **{
            "prompt_id": prompt_id,
            "index": index,
            "prompt": "1+1=?",
            "answer": "2",
            "response": r"\boxed{2}",
            "extracted": "2",
            "reward": 1.0,
            "answer_found": True,
            "num_tokens": 10,
            "finish_reason": FinishReason.STOP,
            "elapsed_s": 1.0,
            **fields,
        }
    )


class TextEquality:
    """A reward pool to which answers are equal if their texts are; what hangs is ``slow``."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_workers = 2

    async def score(self, response_text: str, answer: str) -> Score:
        self.num_calls += 1
        await asyncio.sleep(0)
        if "slow" in response_text or "slow" in answer:
            return Score(reward=0.0, answer_found=False, timed_out=True)
        extracted = response_text.removeprefix(r"\boxed{").removesuffix("}")
        return Score(reward=float(extracted.strip() == answer.strip()), answer_found=True)


def result(
    answers: dict[str, list[str]],
    name: str = "sums",
    right: str = "2",
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> EvalResult:
    """The result of a set: for each prompt the answers of its samples; '' is none."""
    groups = [
        [
            sample(
                prompt_id,
                index,
                **{
                    "extracted": answer,
                    "answer_found": bool(answer),
                    "reward": float(answer == right),
                    **fields,
                },
            )
            for index, answer in enumerate(responses)
        ]
        for prompt_id, responses in answers.items()
    ]
    return asyncio.run(
        summarise(
            name,
            groups,
            TextEquality(),  # type: ignore[arg-type]
            EvalConfig(k_values=(1, 2), bootstrap_resamples=200),
            settings=settings or {},
            seed=0,
        )
    )
