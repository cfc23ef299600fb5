"""Configuration of the rewards (docs/rewards.md)."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.config.section import (
    MAX_MEMORY_MB,
    MAX_WORKERS,
    Section,
    built_in_or_own,
    is_loopback,
    split_address,
)
from bapo_megatron.runtime.names import SHAPING_TERMS

BUILT_IN_FUNCTIONS = ("math", "math_verify", "program", "gym")
"""Reward functions that need no module."""

BATCH_METRICS = (
    *("mean", "solved_groups", "mixed_groups", "answer_found_share"),
    *("timeouts", "errors", "same_answer_share"),
)
"""Names of ``reward/…`` metrics of a batch; reserved, as those of ``SHAPING_TERMS``."""


class HttpRewardConfig(Section):
    """Requests to the HTTP service of ``url``."""

    batch_size: int = Field(32, ge=1)
    """Maximum number of responses in a request."""
    connections: int = Field(4, ge=1, le=MAX_WORKERS)
    """Requests in flight at a time."""
    gather_s: float = Field(0.02, ge=0)
    """How long to wait for further responses before a request is sent."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of a request, until its answer is complete."""
    patience_s: float = Field(300.0, ge=0)
    """Retry a request for this long, with backoff, when the connection fails or the service answers
    5xx, 408, 425 or 429; then the run ends."""
    token_variable: str = Field("", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable with the service's bearer token; empty: none is sent."""


class RewardFunctionConfig(Section):
    """One reward function."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")
    """Its name in metrics: ``reward/<name>``."""
    weight: float = 1.0
    """Factor of its reward in the sum."""
    function: Annotated[str | None, built_in_or_own(BUILT_IN_FUNCTIONS, "function")] = None
    """``math``; ``math_verify`` (math-verify alone); ``program`` (tests for code,
    docs/rewards.md); ``gym`` (scorers of the tasks of ``data.train.gym``); or
    ``package.module:function`` (a static method: ``package.module:Class.method``); run by the
    worker processes."""
    url: str | None = None
    """Address of an HTTP reward service, instead of ``function``."""
    http: HttpRewardConfig = HttpRewardConfig()

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.function is None) == (self.url is None):
            number = "neither" if self.function is None else "both"
            raise ValueError(f"needs either function or url, got {number}; give one of them")
        if self.url is None:
            return self
        parts = split_address(self.url)
        if parts is None:
            raise ValueError(
                f"url must be http://host… or https://host…, got '{self.url}'; correct it"
            )
        if parts.username or parts.password:
            raise ValueError(
                "url must hold no password, since it is logged; name a variable with a token: "
                "http.token_variable"
            )
        is_open = parts.scheme == "http" and not is_loopback(parts.hostname or "")
        if self.http.token_variable and is_open:
            raise ValueError(
                "url must be https, or on this machine, with http.token_variable, got "
                f"'{self.url}': the token would cross the network unencrypted; use https"
            )
        return self


_Functions = tuple[RewardFunctionConfig, ...]


def _names_are_free(functions: _Functions) -> _Functions:
    """Refuse a function whose metric has the name of another one."""
    names = [entry.name for entry in functions]
    for name in names:
        if name in (*BATCH_METRICS, *SHAPING_TERMS):
            raise ValueError(f"the name '{name}' is that of a metric of the run; choose another")
        if names.count(name) > 1:
            raise ValueError(f"the name '{name}' occurs twice; choose another")
    return functions


RewardFunctions = Annotated[_Functions, Field(min_length=1), AfterValidator(_names_are_free)]


class OverlongConfig(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13)."""

    buffer_tokens: int = Field(ge=1)
    """L_cache: the penalty grows over this many tokens before ``rollout.max_response_tokens``."""
    penalty: float = Field(1.0, gt=0)
    """The penalty at the limit."""


class FormatConfig(Section):
    """A reward for training samples that match a format."""

    pattern: str | None = None
    """Regular expression to search for; null: a closed \\boxed{…} that is not empty."""
    reward: float
    """Reward of a response that matches."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        # Python's regex parser does not limit counts and nesting itself.
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is not a regular expression ({error}); correct it") from error
        return pattern


class RepetitionConfig(Section):
    """A penalty for repeated n-grams in training samples (arXiv 2502.03373, Appendix C.2)."""

    ngram_tokens: int = Field(40, ge=1)
    """n, in tokens."""
    penalty: float = Field(gt=0)
    """Penalty of a response whose n-grams are all repetitions."""


class ProgramConfig(Section):
    """The function ``program``, which runs a response's program against tests."""

    score: Literal["all", "share"] = "all"
    """``all``: 1 if every test passes, and the first failure ends the grading; ``share``: the
    fraction of tests that pass."""
    max_tests: int | None = Field(None, ge=1)
    """Use the first tests only; null: all of them."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where programs run; limits are those of one test."""


class RewardConfig(Section):
    """Grading of finished responses (docs/rewards.md)."""

    functions: RewardFunctions = (RewardFunctionConfig(name="math", function="math"),)
    """Functions whose weighted sum is the reward; the first one reports the extracted answer."""
    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    """Grader processes."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit of a function for one answer; beyond it the answer scores 0 and is counted."""
    memory_limit_mb: int = Field(2048, ge=256, le=MAX_MEMORY_MB)
    """Limit of a grader's address space, libraries included; treated like ``timeout_s``."""
    no_answers: tuple[str, ...] = (
        *("proof", "see proof", "proved", "notfound", "no answer", "no answer found"),
        *("see solution", "see the solution", "see above", "not available"),
    )
    """References that are not answers; case, spaces and punctuation are ignored. Where ``math``
    or ``math_verify`` scores, training rows with one, or with an empty one, are left out and
    counted; empty: none."""
    program: ProgramConfig = ProgramConfig()
    on_error: Literal["raise", "zero"] = "raise"
    """When a function fails: end the run, or score 0 and count the failure."""
    truncated: Literal["score", "zero", "mask"] = "score"
    """Truncated training samples: ``score`` them like others, give them ``zero``, or ``mask`` them
    out of the loss (they stay in the baseline of their group)."""
    overlong: OverlongConfig | None = None
    format: FormatConfig | None = None
    repetition: RepetitionConfig | None = None

    @model_validator(mode="after")
    def _programs_have_time(self) -> Self:
        needed_s = self.program.sandbox.timeout_s
        uses = any(entry.function == "program" for entry in self.functions)
        if uses and self.timeout_s <= needed_s:
            raise ValueError(
                f"timeout_s must be above program.sandbox.timeout_s = {needed_s:g} with the "
                f"function program, got {self.timeout_s:g}: it is for all tests of a response; "
                "raise it"
            )
        return self

    @property
    def refused_answers(self) -> tuple[str, ...]:
        """``no_answers`` where ``math`` or ``math_verify`` reads the references, else none."""
        reads = any(entry.function in ("math", "math_verify") for entry in self.functions)
        return self.no_answers if reads else ()
