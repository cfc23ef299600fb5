"""Stands in for SGLang's launcher: one scheduler, which takes weights through a real gloo group.

It works at one call at a time; HTTP goes on meanwhile, behind the launcher's ``InfoAnswers``.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn

from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.engine.collective import join_group, tensor_sizes
from bapo_megatron.engine.sglang.keys import InfoAnswers
from tests.fakes.fake_sglang import INFO


class Server:
    """The application behind ``InfoAnswers``."""

    def __init__(self) -> None:
        self._scheduler = ThreadPoolExecutor(1)
        self._version = "none"
        self._group: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], json.loads((await receive())["body"] or b"{}")
        status, answer = 200, {"weight_version": self._version}
        if path != "/model_info":
            loop = asyncio.get_running_loop()
            try:
                answer = await loop.run_in_executor(self._scheduler, self._act, path, body)
            except RuntimeError as error:  # of a collective
                status, answer = 400, {"message": str(error)}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _act(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/init_weights_update_group":
            place = GroupPlace(
                body["group_name"],
                body["master_address"],
                body["master_port"],
                body["backend"],
                body["rank_offset"],
                body["world_size"],
            )
            self._group = join_group(place, 60.0, 60.0)
        elif path == "/update_weights_from_distributed":
            layout = BucketLayout(*(tuple(body[name]) for name in ("names", "dtypes", "shapes")))
            flat = torch.empty(sum(tensor_sizes(layout)), dtype=torch.uint8)
            self._group.broadcast(flat, root=0).wait()
        self._version = body.get("weight_version", self._version)
        return INFO if path == "/server_info" else {}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args(arguments)
    sys.stdin.readline()  # the keys

    def end_with_owner() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_owner, daemon=True).start()
    app = InfoAnswers(Server())
    uvicorn.run(app, host=options.host, port=options.port, lifespan="off", log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
