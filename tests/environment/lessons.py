"""Shows the tiny model what a second turn is, as written-out episodes of the calculator."""

import random
from pathlib import Path

import torch

from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.environment.base import Task, Turn
from examples.tiny.make import IGNORED_LABEL
from examples.tiny.model import save_model
from examples.tiny.task import Problem, SolutionMixture, split_problems, write_solution
from tests.environment.calculator import Calculator
from tests.policy.tiny_models import load_reference

STEPS = 250
BATCH = 32
PEAK_LR = 2e-3


def teach_two_turns(model_dir: Path, seed: int) -> None:
    """Train the model of ``examples.tiny`` on two-turn episodes, as its warm-up did on one turn.

    Its solutions stay as careless as they were; what the calculator writes has no loss.
    """
    tokenizer = load_tokenizer(model_dir)
    renderer = ChatRenderer(tokenizer, DataConfig())
    model = load_reference("qwen2", model_dir).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # not in the mapped file, which is replaced below
    problems = split_problems(seed).warmup  # none is trained on later, nor held out
    rng = random.Random(f"lessons-{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * (1 - step / STEPS)
        episodes = [_episode(problem, renderer, rng) for problem in rng.choices(problems, k=BATCH)]
        length = max(len(tokens) for tokens, _ in episodes)
        tokens_BS = torch.full((BATCH, length), tokenizer.pad_token_id)
        labels_BS = torch.full((BATCH, length), IGNORED_LABEL)
        for row, (tokens, labels) in enumerate(episodes):
            tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
            labels_BS[row, : len(labels)] = torch.tensor(labels)
        optimizer.zero_grad()
        logits_BSV = model(tokens_BS[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_num_threads(threads)
    save_model(model, tokenizer, model_dir)


def _episode(
    problem: Problem, renderer: ChatRenderer, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Tokens of a whole episode, and their labels: only the policy's have one."""
    mixture, calculator = SolutionMixture(), Calculator()
    text = renderer.text(problem.prompt)
    state = calculator.start(Task("", "", text, problem.answer))
    [prompt] = renderer.token_ids([text])
    tokens, labels = [*prompt], [IGNORED_LABEL] * len(prompt)
    for number in range(2):
        solution = write_solution(problem, mixture, rng)
        [turn] = renderer.token_ids([solution + "<eos>"])
        tokens, labels = [*tokens, *turn], [*labels, *turn]
        if number == 0:
            step = calculator.step(state, Turn(number, solution, turn, 0))
            written = renderer.continuation(step.messages)
            tokens, labels = [*tokens, *written], [*labels, *[IGNORED_LABEL] * len(written)]
            digits = step.messages[0]["content"].removesuffix("=?").split("+")
            problem = Problem(tuple(map(int, digits)))
    return tokens, labels
