"""avg@k and pass@k on evaluation sets, every answer kept in a file."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bapo_megatron.files import atomic_write_text
from bapo_megatron.reward.scoring import avg_at_k, pass_at_k
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.completion import SamplingSettings
from bapo_megatron.types import EvalResult, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bapo_megatron.config.evaluation import EvalConfig
    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.rollout.grading import Grader
    from bapo_megatron.types import Prompt

_REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A named list of prompts."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response, as a line of the results file."""

    prompt_id: str
    index: int
    prompt: str
    answer: str
    response: str
    extracted: str
    reward: float
    answer_found: bool
    num_tokens: int
    finish_reason: FinishReason


class Evaluator:
    """Samples k responses to each prompt of each set."""

    def __init__(
        self,
        grader: Grader,
        sets: Sequence[EvalSet],
        config: EvalConfig,
        results_dir: Path,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together.

        Args:
            grader: Decodes and scores.
            sets: What to evaluate.
            config: k and the sampling settings.
            results_dir: Gets one jsonl file per set and evaluation.
            report: Takes a line about the progress.
        """
        self._grader = grader
        self._sets = tuple(sets)
        self._config = config
        self._results_dir = results_dir
        self._report = report

    async def evaluate(self, pool: EnginePool, step: int) -> list[EvalResult]:
        """Score every set with the weights that the servers hold.

        Args:
            pool: The servers.
            step: Names the results files ``step_<step>_<set>.jsonl``; negative: ``start_<set>``.

        Raises:
            RolloutError: A server failed, or gave up (inside an exception group).
            OSError: The results cannot be written.
        """
        return [await self._evaluate_set(pool, step, eval_set) for eval_set in self._sets]

    async def _evaluate_set(self, pool: EnginePool, step: int, eval_set: EvalSet) -> EvalResult:
        started_s = time.monotonic()
        pool.reopen()
        async with asyncio.TaskGroup() as tasks:
            answers_by_prompt = [
                [
                    tasks.create_task(self._answer(pool, eval_set, row, index))
                    for index in range(self._config.samples_per_prompt)
                ]
                for row in range(len(eval_set.prompts))
            ]
            await self._report_until_done(
                eval_set, [task for answers in answers_by_prompt for task in answers]
            )
        rows = [[task.result() for task in answers] for answers in answers_by_prompt]
        self._write(step, eval_set, rows)
        assert pool.version is not None, "a generated answer implies a version"
        return self._result(eval_set, rows, pool.version, time.monotonic() - started_s)

    async def _answer(self, pool: EnginePool, eval_set: EvalSet, row: int, index: int) -> _Answer:
        prompt, config = eval_set.prompts[row], self._config
        completion = await pool.generate(
            prompt.token_ids,
            SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens,
                top_p=config.top_p,
            ),
            label=f"evaluation of {eval_set.name}, {prompt.prompt_id}, sample {index}",
            affinity=-1 - row,  # numbers of its own: those of groups may be in use
            return_logprobs=False,
        )
        assert completion is not None, "evaluations are never drained"
        text, score = await self._grader.grade(
            completion.token_ids, prompt, completion.finish_reason
        )
        return _Answer(
            prompt_id=prompt.prompt_id,
            index=index,
            prompt=prompt.text,
            answer=prompt.answer,
            response=text,
            extracted=score.extracted,
            reward=score.reward,
            answer_found=score.answer_found,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )

    async def _report_until_done(
        self, eval_set: EvalSet, tasks: Sequence[asyncio.Task[_Answer]]
    ) -> None:
        while num_open := sum(not task.done() for task in tasks):
            self._report(f"evaluation of {eval_set.name}: {len(tasks) - num_open}/{len(tasks)}")
            await asyncio.wait(tasks, timeout=_REPORT_INTERVAL_S)

    def _write(self, step: int, eval_set: EvalSet, rows: Sequence[Sequence[_Answer]]) -> None:
        moment = f"step_{step:06d}" if step >= 0 else "start"
        path = self._results_dir / f"{moment}_{eval_set.name}.jsonl"
        lines = (
            json.dumps(asdict(answer), ensure_ascii=False) + "\n"
            for answers in rows
            for answer in answers
        )
        try:
            atomic_write_text(path, "".join(lines))
        except OSError as error:
            raise RolloutError(
                f"cannot write the evaluation results to {path}: {error.strerror}; free space, or "
                "change run_dir"
            ) from error

    def _result(
        self, eval_set: EvalSet, rows: Sequence[Sequence[_Answer]], version: int, wall_s: float
    ) -> EvalResult:
        answers = [answer for prompt_answers in rows for answer in prompt_answers]
        rewards = [[answer.reward for answer in prompt_answers] for prompt_answers in rows]
        num_tokens = sum(answer.num_tokens for answer in answers)
        num_truncated = sum(answer.finish_reason is FinishReason.LENGTH for answer in answers)
        return EvalResult(
            name=eval_set.name,
            num_prompts=len(rows),
            samples_per_prompt=self._config.samples_per_prompt,
            avg_at_k=avg_at_k(rewards),
            pass_at_k=pass_at_k(rewards, self._config.samples_per_prompt),
            answer_found_share=sum(answer.answer_found for answer in answers) / len(answers),
            response_tokens_mean=num_tokens / len(answers),
            truncated_share=num_truncated / len(answers),
            generated_tokens=num_tokens,
            wall_s=wall_s,
            version=version,
        )
