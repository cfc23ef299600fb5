"""Agents' episodes without an engine: a renderer, a policy that a seed decides, and a proxy."""

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Proxy, Session, SessionLimits
from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.record import Call, Completion, Record
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.types import FinishReason, PromptTokens, Sample
from tests.data.test_tools import ADDED, TEMPLATES

EOS = "<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def agent_config(**rollout: Any) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"agent": "somewhere:agent", "agent_sandbox": None, "tool_format": "hermes"} | rollout
    )


def make_renderer(tokenizer_dir: Path, tool_format: str = "hermes", **rollout: Any) -> ChatRenderer:
    """A renderer of a format's kind of template, with one token per byte."""
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATES[tool_format]
    special, plain = ADDED[tool_format] if tool_format != "hermes" else ([], [])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    config = agent_config(tool_format=tool_format, **rollout)
    return ChatRenderer(tokenizer, DataConfig(), config)


def sequences_of(record: Record) -> Sequence[Sample]:
    """What an episode with these calls trains."""
    prompt = PromptTokens("p:0", np.empty(0, np.int32))
    return record.sample(0, 0, prompt, FinishReason.STOP).sequences


class Policy:
    """Samples what a script says for each call, token for token."""

    def __init__(self, renderer: ChatRenderer, says: Callable[[Call], str]) -> None:
        self.renderer = renderer
        self.says = says
        """The text of a call's turn."""
        self.calls: list[Call] = []
        """All that were sampled, in order."""
        self.prompts: list[list[int]] = []
        """What the engine saw for each."""
        self.ends = EOS, "<|eom_id|>", "<|eot_id|>", "<|call|>", "<|return|>"

    async def sample(self, call: Call) -> None:
        self.calls.append(call)
        self.prompts.append(call.prompt().tolist())
        text = self.says(call)
        text += "" if text.endswith(self.ends) else EOS
        [token_ids] = self.renderer.token_ids([text])
        token_ids = token_ids[call.num_tokens :][: call.max_tokens - call.num_tokens]
        has_end = self.renderer.decode(token_ids).endswith(self.ends)
        ids = np.array(token_ids, np.int32)
        logprobs = np.array([-random.random() for _ in ids], np.float32)
        end = FinishReason.STOP if has_end else FinishReason.LENGTH
        versions = spans_of(np.full(len(ids), len(self.calls)))
        part = Completion(ids, logprobs, versions, end)
        call.append(call.until_stop(part, partial(self.renderer.decode, skips_special=True)))


@contextlib.asynccontextmanager
async def open_session(
    renderer: ChatRenderer,
    sample: Any,
    *,
    limits: SessionLimits | None = None,
    rules: SamplingRules | None = None,
) -> AsyncIterator[tuple[Session, str, str]]:
    """A session, the proxy's address and the session's key."""
    proxy = Proxy()
    rules = rules or SamplingRules(temperature=1.0)
    limits = limits or SessionLimits(1000, 1_000_000, 100_000)
    session = Session(Record(), renderer, rules, limits, sample)
    await proxy.open(has_port=True)
    try:
        with proxy.admitted(session) as key:
            yield session, proxy.base_url, key
    finally:
        await session.close()
        await proxy.close()
