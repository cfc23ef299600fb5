"""Entry point of an SGLang server: ``python -m bapo_megatron.engine.sglang.launcher <arguments>``.

The arguments are those of ``sglang.launch_server``; ``server.SglangServer`` starts it. This is the
only file that imports sglang. It adds:

* Without CUDA, sglang becomes importable, and its processes are forks of this one.
* API keys arrive on standard input and go only to ``KeyCheck``: process listings do not show them,
  and SGLang's settings, which it logs and serves, contain a placeholder.
* ``keys`` decides which call requires which key, and extends ``/server_info``.
* The rendezvous of the server's ranks is a file in its private temporary directory. SGLang would
  use a torch store, which listens on all interfaces without a key.
* The process group and the directory go away with the owner, however it died.
"""

import importlib.machinery
import json
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.engine.sglang import SHARED_FILES
from bapo_megatron.engine.sglang.keys import InfoAnswers, KeyCheck
from bapo_megatron.runtime.cpu_torch import uncompiled_imports
from bapo_megatron.runtime.processes import OWNER_PID_VARIABLE, unlink_shared_files

_INIT_METHOD_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_OWNER_POLL_S = 1.0
_SGL_KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
"""Functions that sglang's CPU engine imports; only speculative decoding calls them."""


def _prepare_cpu() -> None:
    """Import sglang without a GPU, and make it fork its processes, so that they import nothing.

    There is no CPU build of ``sgl_kernel`` on the package index; a module with the names that
    sglang imports replaces it.
    """
    kernels = types.ModuleType("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    for name in _SGL_KERNEL_NAMES:
        setattr(kernels, name, None)
    sys.modules.setdefault("sgl_kernel", kernels)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *method, force=False: None
    # A CUDA build of torch returns torch.cuda, which a fork cannot initialise.
    torch.get_device_module = lambda *device: torch.cpu  # type: ignore[assignment]
    with uncompiled_imports():
        import sglang.srt.entrypoints.http_server
        import sglang.srt.models.registry  # noqa: F401
        from sglang.srt.mem_cache.pool_host import common

    # It would pin the host buffer of routed experts with cudaHostRegister; there is no CUDA here.
    common._cuda_host_register = lambda *_, **__: None
    # Layers with adapters pin small tensors, however they are made.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that makes a tensor, without its option ``pin_memory``."""
    return lambda *values, pin_memory=False, **options: make(*values, **options)


def main(arguments: list[str]) -> None:
    """Run the server with arguments of ``sglang.launch_server`` until it ends."""
    # SIGUSR2 requests the stacks of the run's own processes; children inherit that it is ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    owner_pid = int(os.environ.pop(OWNER_PID_VARIABLE))
    settings = json.loads(sys.stdin.buffer.readline())
    scratch = Path(settings["scratch"])
    threading.Thread(target=_end_with_owner, args=(owner_pid, scratch), daemon=True).start()
    keys = {name: key for name, key in settings["keys"].items() if key}
    assert "admin_api_key" in keys, "without it anybody could replace the weights"
    if not torch.cuda.is_available():
        _prepare_cpu()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import auth, kill_process_tree

    load_plugins()
    server_args = prepare_server_args(arguments)
    for name in keys:
        setattr(server_args, name, "redacted")
    if server_args.tokenizer_worker_num != 1:
        sys.exit("--tokenizer-worker-num must be 1: with several, SGLang checks no key; remove it")
    auth.add_api_key_middleware = lambda app, **_: _add_middleware(app, keys)
    is_one_group = server_args.nnodes == server_args.dp_size == server_args.attn_dp_size == 1
    if is_one_group and not server_args.dist_init_addr:
        os.environ.setdefault(_INIT_METHOD_VARIABLE, f"file://{scratch / 'ranks'}")
        # Without a store, SGLang names the shared memory of CPU kernels after these.
        os.environ.setdefault("MASTER_ADDR", server_args.host)
        os.environ.setdefault("MASTER_PORT", str(server_args.port))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _add_middleware(app: Any, keys: dict[str, str]) -> None:
    app.add_middleware(InfoAnswers)
    # Added last, so called first.
    app.add_middleware(KeyCheck, api_key=keys.get("api_key"), admin_api_key=keys["admin_api_key"])


def _end_with_owner(owner_pid: int, scratch: Path) -> None:
    """Kill the process group and remove ``scratch`` once the owner is gone, however it died.

    Standard input then closes unless a fork of the owner holds it; hence also the parent's id.
    """
    while os.getppid() == owner_pid:
        readable, _, _ = select.select([sys.stdin], [], [], _OWNER_POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            break
    unlink_shared_files(os.getpgrp(), SHARED_FILES)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
