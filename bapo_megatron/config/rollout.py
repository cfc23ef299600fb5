"""Configuration of generation: engines, partial and asynchronous rollout, staleness, weight sync.

The *age* of a token: optimizer updates since the weights that sampled it (docs/algorithm.md).
"""

import importlib
import operator
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from bapo_megatron.config.sandbox import BubblewrapConfig, SandboxConfig
from bapo_megatron.config.section import (
    MAX_MEMORY_MB,
    MAX_WORKERS,
    AbsolutePath,
    Section,
    built_in_or_own,
    is_named_object,
)
from bapo_megatron.runtime.calls import shown_value

_engines = importlib.import_module("bapo_megatron.engine")  # a layer above, as in ``schema``
ENGINES: tuple[str, ...] = tuple(_engines.BUILT_IN)
"""Built-in engines."""
WITH_SERVERS: tuple[str, ...] = _engines.WITH_SERVERS
"""Those of them that sample in servers."""
ToolFormat = Literal["none", "hermes", "llama3", "qwen3_coder", "glm45", "harmony"]
TOOL_FORMATS: tuple[str, ...] = get_args(ToolFormat)
"""How a policy writes tool calls."""
SINGLE_TURN = "single_turn"
"""The environment that ends every episode after its first turn."""
PYTHON_TOOL = "python_tool"
"""The environment in which the policy runs Python."""
TURN_FRACTION = 0.8
"""Fraction of ``episodes.step_timeout_s`` for cells; interpreters start and end in the rest."""
_PYTHON_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints, and the value of a last "
        "expression. Variables stay for later calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


def checked_tools[ToolsT: Sequence[Any]](tools: ToolsT) -> ToolsT:
    """Return tools; a ``ValueError`` for what is no JSON schema of one."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                "must be JSON schemas {type: function, function: {name, …}}, got "
                f"{shown_value(tool)}; add what is missing"
            )
    return tools


class SpeculativeConfig(Section):
    """Speculative decoding on GPUs (docs/rollout.md#faster-rollout)."""

    method: Literal["none", "draft", "mtp"] = "none"
    """What proposes tokens, which the policy accepts or replaces: a smaller model (``draft``), or
    the multi-token-prediction layers of ``model.path`` (``mtp``)."""
    draft_model: AbsolutePath | None = None
    """Directory of the smaller model, with the policy's vocabulary; it is never trained."""
    draft_tokens: int = Field(1, ge=1, le=15)
    """Tokens proposed per decode step."""

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if (self.draft_model is not None) != (self.method == "draft"):
            raise ValueError(
                f"draft_model must be set with method: draft, and only then, got "
                f"{self.draft_model} with {self.method}; change one of them"
            )
        return self


class ServerConfig(Section):
    """Servers that this project starts: the trainer's own, or those of ``serve``."""

    count: int = Field(1, ge=1)
    """Number of servers; each takes the node's next ``tensor`` GPUs."""
    first_gpu: int = Field(0, ge=0)
    """First of the visible GPUs to use; beside a trainer on the same node, the one after the
    trainer's."""
    host: str = "127.0.0.1"
    """Address that the servers of ``serve`` listen on; the trainer's own stay on the loopback."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the first server; the others follow. 0: free ports."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time limit of a start, until the server answers."""
    max_restart_wait_s: float = Field(60.0, ge=1)
    """A server that ended is restarted at once, then after 1, 2, 4, … seconds up to this."""
    tensor: int = Field(1, ge=1)
    """Tensor-parallel size of each server."""
    mem_fraction: float = Field(0.8, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Size of the KV cache in tokens; null: the server's choice on a GPU, else 65536."""
    max_running_requests: int | None = Field(None, ge=1)
    """Maximum batch size; null: the server's choice."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    quantization: Literal["none", "fp8"] = "none"
    """``fp8``: every weight sync is quantized; needs ``algorithm.correction``, and Qwen2 or
    Qwen3."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for the server's own command."""


class DynamicSamplingConfig(Section):
    """Replacement of groups without a learning signal, whose rewards are all equal."""

    enabled: bool = False
    """Leave out groups whose rewards are all equal, and sample others until the batch is full."""
    max_groups_ratio: float = Field(4.0, ge=1)
    """Limit of the groups finished for a batch, over ``groups_per_step``; once it is reached, the
    groups that were left out last fill the batch."""


class StalenessConfig(Section):
    """Treatment of tokens, responses or groups that are too stale to train on."""

    max_age: int | None = Field(None, ge=0)
    """Maximum age when a batch is formed, in optimizer updates; null: no limit."""
    measure: Literal["token", "mean", "oldest"] = "oldest"
    """Age to limit: that of each token (``action: mask`` only), the mean over a response's tokens,
    or that of its oldest token."""
    action: Literal["drop", "mask", "regenerate"] = "drop"
    """``drop`` the response's whole group; ``mask`` the tokens (``measure: token``) or the response
    out of the loss; ``regenerate`` the response from its prompt."""

    @model_validator(mode="after")
    def _tokens_are_masked(self) -> Self:
        if self.measure == "token" and self.action != "mask":
            raise ValueError(
                f"measure must be mean or oldest with action: {self.action}, got token: a response "
                "is dropped or regenerated as a whole; set action: mask, or another measure"
            )
        return self


class WeightSyncConfig(Section):
    """Transfer of new weights to the servers."""

    method: Literal["broadcast", "disk", "tensor"] = "broadcast"
    """``broadcast``: a collective group of rank 0 and all servers; ``disk``: a directory that they
    share; ``tensor``: shared memory, for servers on rank 0's node."""
    adapters: Literal["merged", "adapter"] | None = None
    """With ``model.lora``, send the ``merged`` weights, or each ``adapter`` alone, which the engine
    adds to the base that it has read from ``model.path``. Null: ``adapter`` with the engine local
    (without ``sampling_bits``), else merged."""
    in_flight: Literal["abort", "retract", "in_place"] = "abort"
    """Requests in flight are ``abort``ed and resumed with what they had; or the servers pause:
    ``retract`` recomputes their KV cache under the new weights, ``in_place`` keeps the old one, so
    that later log-probs belong to no single version."""
    bucket_mb: int = Field(512, ge=1)
    """Size limit of a bucket of weights, in 10^6 bytes (a bucket has at least one tensor)."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of the broadcast group; ``auto``: nccl where rank 0 has a GPU and no engine is in the
    collector's process, else gloo."""
    master_address: str = ""
    """Address of rank 0 as the servers see it; empty: the loopback for servers on it, else this
    host's name."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit of an attempt with the available servers (``health.patience_s``: the wait for
    one), and of ``verify``. Servers that exceed it are removed; the others get a new attempt."""
    verify: Literal["none", "first", "every"] | Annotated[int, Field(ge=1)] = "first"
    """Compare log-probs of a probe batch with the trainer's after a server's ``first`` weight sync
    since it was (re)started, after ``every`` one, or also after every N-th (the default with
    ``model.lora``: 10), and remove servers that differ, or that do not follow the trainer's since
    the comparison before. Unless requests are ``abort``ed, and with ``colocated``, tokens that it
    sampled in between stay."""
    verify_tolerance: float = Field(0.1, gt=0)
    """Limit of the probe's mean absolute log-prob difference; 1e-3 suits float32."""


class HealthConfig(Section):
    """When a server counts as lost, and how long the run waits for one."""

    interval_s: float = Field(5.0, gt=0)
    """Time between two health checks of a server."""
    timeout_s: float = Field(30.0, gt=0)
    """Remove a server that answers no check for this long."""
    stuck_timeout_s: float = Field(120.0, gt=0)
    """A server whose scheduler does not respond for this long, outside a weight sync, is restarted
    by its owner (the trainer, or ``serve``)."""
    patience_s: float = Field(900.0, gt=0)
    """How long a run without a usable server waits before it saves and ends."""


class LocalConfig(Section):
    """The engine ``local``: the transformers model in the collector's process."""

    max_rows: int = Field(256, ge=8)
    """Maximum number of responses in a decode step; others wait their turn."""
    threads: int | None = Field(None, ge=1)
    """Threads that compute on a CPU; null: ``OMP_NUM_THREADS``. Without ``async_steps`` the ranks
    wait meanwhile, so that it may be the number of cores."""
    decode_steps_ahead: int | None = Field(None, ge=1)
    """Decode steps beside the training of a batch, with ``async_steps``; null: half of
    ``max_response_tokens``. The next weight sync waits for them (docs/rollout.md)."""
    sampling_bits: Literal[4, 8] | None = None
    """For studies of a biased sampler: sample with the linear layers' weights rounded to so many
    bits, and record log-probs of that model; the trainer's weights stay. Null: not rounded."""


class EpisodesConfig(Section):
    """Limits of the episodes of a ``rollout.environment``."""

    max_turns: int = Field(8, ge=1)
    """Maximum number of policy turns in a response."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one call; an environment that exceeds it has failed. ``python_tool`` gives the
    cells of a turn four fifths of it."""
    workers: int = Field(4, ge=1, le=MAX_WORKERS)
    """Processes that run the environment, each one call at a time."""
    memory_limit_mb: int = Field(2048, ge=256, le=MAX_MEMORY_MB)
    """Limit of each worker's address space; beyond it the environment has failed."""
    on_error: Literal["raise", "zero", "mask"] = "raise"
    """When an environment fails (an agent that is killed or too slow does not count): end the run,
    or only the episode, which is counted and has the reward 0; ``mask`` also leaves it out of the
    loss (it stays in the baseline of its group)."""


class AgentLimitsConfig(Section):
    """Limits of the episodes of a ``rollout.agent``; ``max_response_tokens`` is over all calls."""

    max_calls: int = Field(64, ge=1)
    """Maximum number of calls in an episode."""
    timeout_s: float = Field(300.0, gt=0)
    """Time limit of an agent's own work in an episode, without its waits for turns; an agent that
    exceeds it has failed."""
    commands: int = Field(16, ge=1, le=MAX_WORKERS)
    """Maximum number of commands, or of episodes with workers of their own, at a time; further
    episodes wait."""
    isolation: Literal["worker", "episode"] = "worker"
    """Episodes of a function share a ``worker``, or each ``episode`` has one, with a sandbox: for
    agents that run programs of the policy. A command in a sandbox always has its own."""
    workers: int = Field(1, ge=1, le=MAX_WORKERS)
    """Processes that run a function, with ``isolation: worker``."""
    episodes: int = Field(256, ge=1, le=MAX_WORKERS)
    """Maximum number of episodes at a time in each of them; further episodes wait. The openai SDK's
    client has 1000 connections; lower this if an episode makes several calls at once."""


class PythonToolConfig(Section):
    """The environment ``python_tool``."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where cells run."""
    max_output_characters: int = Field(4000, ge=2)
    """Longer outputs lose their middle before the policy reads them."""


_EXCLUDED = {
    "fixed_lag": (
        "each step's groups, and no others, are completed by the weights of one sync",
        (
            *("async_steps", "oversample_groups", "tokens_per_step", "colocated"),
            "dynamic_sampling.enabled",
        ),
    ),
    "partial_tokens": (
        "a round draws groups_per_step prompts, and nothing is sampled beside the training",
        ("async_steps", "fixed_lag", "oversample_groups", "tokens_per_step"),
    ),
    "colocated": (
        "the servers are the trainer's own and idle while it trains",
        ("async_steps", "servers", "servers_file", "min_servers"),
    ),
    "servers": ("both say where servers are", ("servers_file",)),
}
"""Settings that exclude others, and why."""


class RolloutConfig(Section):
    """Generation of one step's samples."""

    engine: Annotated[str, built_in_or_own(ENGINES, "Class")] = Field(
        ENGINES[0],
        description=", ".join(
            f"``{name}`` ({about})" if about else f"``{name}``"
            for name, about in _engines.BUILT_IN.items()
        )
        + ", or ``package.module:Class``.",
    )
    environment: Annotated[str, built_in_or_own((SINGLE_TURN, PYTHON_TOOL), "Class")] = SINGLE_TURN
    """What answers the policy's turns: nothing (``single_turn``), an interpreter
    (``python_tool``), or ``package.module:Class`` (docs/extending.md)."""
    episodes: EpisodesConfig = EpisodesConfig()
    agent: str | tuple[str, ...] | None = None
    """Plays each episode through the OpenAI protocol (docs/agents.md): ``package.module:function``,
    or a command, such as ``python agent.py``."""
    agent_python: AbsolutePath | None = None
    """Interpreter of a function outside a sandbox, 3.9 or later, with packages of its own; null:
    this one. In a sandbox it is ``agent_sandbox.python``."""
    agent_sandbox: BubblewrapConfig | None = BubblewrapConfig(memory_limit_mb=4096, processes=256)
    """Where agents run (bubblewrap): without any network but the proxy, each command in a sandbox
    of its own. Null: outside, as this user, which an agent that runs programs of the policy must
    not."""
    agent_sampling: Literal["refuse", "override"] = "refuse"
    """What happens to requests whose sampling parameters are not the run's."""
    agent_gets_answer: bool | None = None
    """Whether an agent's task has ``answer``. Null: a function's only, because programs that a
    command starts can read its memory."""
    agent_reasoning: Literal["content", "separate"] = "content"
    """Where chat completions have a turn's reasoning (up to ``</think>``): in ``content``, as it
    was sampled, or beside it in ``reasoning_content``."""
    agent_limits: AgentLimitsConfig = AgentLimitsConfig()
    tool_format: ToolFormat = "none"
    """How the policy writes tool calls: ``hermes`` (Qwen2.5, Qwen3), ``llama3``, ``qwen3_coder``
    (Qwen3-Coder, Qwen3.5), ``glm45`` (GLM-4.5 and later) or ``harmony`` (gpt-oss); the chat
    template must render ``tools`` in the same way."""
    tools: Annotated[tuple[dict[str, Any], ...], AfterValidator(checked_tools)] = ()
    """JSON schemas of the environment's tools: ``{type: function, function: {name, description,
    parameters}}``."""
    python_tool: PythonToolConfig = PythonToolConfig()
    groups_per_step: int = Field(64, ge=1)
    """Prompts per step."""
    samples_per_group: int = Field(8, ge=2)
    """Responses per prompt, G."""
    max_response_tokens: int = Field(4096, ge=1)
    """Maximum response length, over all resumptions, turns and sequences of an episode, an
    environment's text included."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""
    oversample_groups: int = Field(0, ge=0)
    """Groups in flight beyond ``groups_per_step``. Once the step has its groups, unfinished
    responses are aborted; the next step resumes them if ``partial``, else they are discarded."""
    partial: bool = True
    """Keep unfinished responses of one step and resume them in the next (partial rollout)."""
    partial_tokens: int | None = Field(None, ge=1)
    """Tokens that a response may get in one round of sampling (the budget of partial rollouts);
    then it rests until the next round: a later step's, or this step's where no batch is complete.
    A round begins with ``groups_per_step`` new prompts. Null: no rounds, and no such limit."""
    tokens_per_step: int | None = Field(None, ge=1)
    """Response tokens to generate for a step, which then takes the complete groups (at least one
    per update); null: only ``groups_per_step`` ends it."""
    max_carries: int | None = Field(None, ge=1)
    """Number of batches that a started group may miss before it is dropped; null: any."""
    async_steps: int = Field(0, ge=0)
    """Number of steps that generation may be ahead of training; 0: never ahead."""
    fixed_lag: int | None = Field(None, ge=1)
    """For studies of staleness: sample every response of a step with the weights from exactly this
    many steps earlier (in the first steps: the first weights); the weight sync waits until all are
    complete. Null: the newest weights."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    servers: tuple[str, ...] = ()
    """Addresses (http://host:port) of running servers; empty: the trainer starts its own."""
    servers_file: AbsolutePath | None = None
    """File with these addresses instead, one on each line, read again during the run:
    servers join and leave as their lines come and go."""
    min_servers: int | None = Field(None, ge=1)
    """Number of servers that must answer before the run begins; the others join when they are
    ready. Null: all of them."""
    server: ServerConfig = ServerConfig()
    local: LocalConfig = LocalConfig()
    health: HealthConfig = HealthConfig()
    colocated: bool = False
    """Let the trainer's own servers share its GPUs and release their memory while it trains."""
    request_timeout_s: float = Field(1800.0, gt=0)
    """Remove a server that, with requests in flight, samples no token for this long."""
    max_connections: int | None = Field(None, ge=1)
    """Limit of the requests in flight, over all servers; null: as many as their KV caches are
    expected to hold, or 512 with an engine that does not report its KV cache."""
    stream_tokens: int | None = Field(None, ge=1)
    """Tokens per streamed chunk, the most that a response loses with its server. Null: a 64th of
    ``max_response_tokens``, but at least 64 and at most 512."""
    dump: bool = True
    """Keep every step's samples as ``<run_dir>/rollouts/step_<n>.parquet``, ready for replay, and
    their texts in ``rollouts/texts/`` and, with ``router_replay: rollout``, their experts in
    ``rollouts/routes/``."""
    keep_dumps: int = Field(0, ge=0)
    """Number of newest dumps to keep, with their texts and experts; 0: all. Must exceed
    ``checkpoint.every_steps``, so that a replay from the newest checkpoint has all later steps."""

    @property
    def has_own_gpus(self) -> bool:
        """Whether it samples in servers on other GPUs than the trainer's."""
        return self.engine in WITH_SERVERS and not self.colocated

    @property
    def starts_servers(self) -> bool:
        """Whether servers, if the engine needs any, are the trainer's own."""
        return not self.servers and self.servers_file is None

    @property
    def steps_ahead(self) -> int:
        """Number of steps that generation may be ahead of training."""
        return self.async_steps if self.fixed_lag is None else self.fixed_lag

    @property
    def num_rounds(self) -> int:
        """Rounds of ``partial_tokens`` that the longest response takes; 1 without them."""
        return -(-self.max_response_tokens // (self.partial_tokens or self.max_response_tokens))

    @property
    def decode_steps_ahead(self) -> int:
        """Decode steps of a driven engine beside the training of one batch."""
        return self.local.decode_steps_ahead or -(-self.max_response_tokens // 2)

    @property
    def piece_tokens(self) -> int:
        """Tokens per streamed chunk."""
        return self.stream_tokens or min(max(self.max_response_tokens // 64, 64), 512)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of all tools."""
        has_python = self.environment == PYTHON_TOOL
        return [*self.tools, _PYTHON_SCHEMA] if has_python else list(self.tools)

    @property
    def has_environment(self) -> bool:
        """Whether episodes may have several turns."""
        return self.environment != SINGLE_TURN or self.agent is not None

    @property
    def environment_name(self) -> str | None:
        """What plays with the policy, the words of a command as one text; None: nothing."""
        if self.agent is not None:
            return shlex.join(self.agent_command) or str(self.agent)
        return self.environment if self.has_environment else None

    @property
    def agent_command(self) -> tuple[str, ...]:
        """The words of an agent's command; empty without one."""
        if isinstance(self.agent, tuple):
            return self.agent
        if self.agent is None or is_named_object(self.agent):
            return ()
        return tuple(shlex.split(self.agent))

    @property
    def agent_has_answer(self) -> bool:
        """Whether an agent's task has ``answer``."""
        return not self.agent_command if self.agent_gets_answer is None else self.agent_gets_answer

    @model_validator(mode="after")
    def _tools_have_a_format_and_an_owner(self) -> Self:
        if self.agent is None:
            if bool(self.tool_schemas) != (self.tool_format != "none"):
                raise ValueError(
                    f"tool_format must be one of {', '.join(TOOL_FORMATS[1:])} with tools, and none"
                    f" without, got {self.tool_format} and {len(self.tool_schemas)} tools; set both"
                )
            return self
        if self.environment != SINGLE_TURN or self.tools:
            key = "tools" if self.tools else "environment"
            raise ValueError(
                f"{key} must be left out with agent, got {getattr(self, key)}: the agent is the "
                "environment, and sends its tools; leave one of them out"
            )
        try:
            is_empty = not (self.agent_command or is_named_object(str(self.agent)))
        except ValueError:  # a quote that is not closed
            is_empty = True
        if is_empty:
            raise ValueError(
                "agent must be package.module:function or a command, got "
                f"{shown_value(self.agent)}; correct it"
            )
        if self.agent_sandbox is not None and self.agent_python is not None:
            raise ValueError(
                f"agent_python must be left out with a sandbox, got {self.agent_python}; set "
                "agent_sandbox.python, or agent_sandbox: null"
            )
        return self

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        cell_s, limit_s = self.python_tool.sandbox.timeout_s, self.episodes.step_timeout_s
        needed_s = cell_s / TURN_FRACTION
        if self.environment == PYTHON_TOOL and limit_s < needed_s:
            raise ValueError(
                f"episodes.step_timeout_s must be at least {needed_s:g} with "
                f"python_tool.sandbox.timeout_s = {cell_s:g}, got {limit_s:g}: it is for all "
                "cells of a step; raise it"
            )
        if self.local.sampling_bits is not None and self.engine in WITH_SERVERS:
            raise ValueError(
                f"local.sampling_bits must be null with engine: {self.engine}, got "
                f"{self.local.sampling_bits}: only the local engine rounds; leave it out"
            )
        later = ("async_steps", "partial_tokens", "tokens_per_step", "max_carries", "fixed_lag")
        for name in later:
            if getattr(self, name) and not self.partial:
                raise ValueError(
                    f"partial must be true with {name}, got false: responses are kept for later "
                    f"steps; set partial: true, or leave {name} out"
                )
        for name, (reason, excluded_names) in _EXCLUDED.items():
            for other in excluded_names:
                first, second = operator.attrgetter(name, other)(self)
                if first and second:
                    raise ValueError(
                        f"{other} must be left out with {name}: {first}, got {second}: {reason}; "
                        "leave one of them out"
                    )
        return self


class ReplayConfig(Section):
    """Samples to train on again. ``replay: DIR`` is short for ``replay: {dumps: DIR}``."""

    dumps: AbsolutePath | None = None
    """Directory of rollout dumps to train on, without any server."""
    batches: int = Field(0, ge=0)
    """Number of earlier batches whose groups may be trained on again, mixed with new ones."""
    share: float = Field(0.5, gt=0, lt=1)
    """Fraction of a batch's groups to take from earlier batches, if there are enough."""
    max_age: int | None = Field(None, ge=1)
    """Age limit of the oldest token of a replayed group, in optimizer updates; null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"dumps": value} if value is None or isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.dumps is not None and self.batches:
            raise ValueError(
                f"batches must be 0 with dumps, got {self.batches}: nothing is generated that "
                "could be added to; leave one of them out"
            )
        return self
