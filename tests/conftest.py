"""Fixtures that several packages share."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.runtime.processes import own_compiler_cache
from tests.engine.helpers import MakeConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_EXHAUSTIVE = {"benchmarks", "fuzz", "study"}
"""Folders whose tests are all marked ``exhaustive``."""
_ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Only ``-m gpu`` sees GPUs: servers and ranks of other tests would fight over the first."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    own_compiler_cache()  # torch would make one of a name that anybody can predict


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules of tests import Megatron as the commands do."""
    from bapo_megatron.runtime.cpu_torch import uncompiled_imports

    with uncompiled_imports():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of some folders; modules with more marks of long tests come first.

    Workers take whole modules (``--dist loadscope``); a long one at the end would run alone.
    """
    for item in items:
        if item.path.relative_to(_ROOT).parts[0] in _EXHAUSTIVE:
            item.add_marker(pytest.mark.exhaustive)
    marks = {path: set[str]() for path in {item.path for item in items}}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        marks[item.path] |= names & {"sglang", "distributed", "slow"}
    items.sort(key=lambda item: -len(marks[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    # No test comes near the limit on a machine that works.
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 300))
    return True


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with GSM8K and AIME, beside the checkout; skips where it is not there."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}")
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer with one token per byte and a ChatML template, made offline.

    Byte tokens have ids 0 to 255; ``<|im_end|>`` ends a sequence.
    """
    from tests.fakes.byte_tokenizer import save_byte_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder, CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose logits are far from uniform, with the tiny tokenizer."""
    from tests.engine.helpers import make_model_dir

    return make_model_dir(tmp_path_factory.mktemp("model:base"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of four layers with the tiny tokenizer; its logits are far from uniform."""
    from tests.trainer.dumps import make_random_model

    return make_random_model(tmp_path_factory.mktemp("random_model"))


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A real server; tests leave no request behind, and give it back the weights it had."""
    from tests.engine.sglang.servers import make_server, running

    with running(make_server(model_dir, tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a test; what a failed one leaves behind is killed."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> MakeConfig:
    """Builds a configuration in ``tmp_path``; arguments change its rollout section."""
    from tests.engine.sglang.servers import SERVER

    prompts = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))

    def make(**rollout: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "test",
                "run_dir": tmp_path / "run",
                "model": {"path": model_dir, "dtype": "float32"},
                "data": {"train": {"path": train}, "max_prompt_tokens": 32},
                "rollout": {
                    "groups_per_step": 3,
                    "samples_per_group": 2,
                    "max_response_tokens": 40,
                    "server": SERVER,
                    **rollout,
                },
                "reward": {"workers": 1},
                "eval": {
                    "sets": [{"path": train, "name": "sums"}],
                    "max_prompts": 5,
                    "samples_per_prompt": 2,
                    "max_response_tokens": 12,
                },
            }
        )

    return make
