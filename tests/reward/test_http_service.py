import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bapo_megatron.config.reward import HttpRewardConfig
from bapo_megatron.reward import http_service
from bapo_megatron.reward.base import Response, RewardError, SampleFacts
from bapo_megatron.reward.http_service import HttpReward

URL = r"http://127\.0\.0\.1:\d+/score"


@pytest.fixture(autouse=True)
def _quick_repetitions_and_a_dead_proxy(monkeypatch):
    """A proxy of the environment must not come between trainer and service."""
    monkeypatch.setattr(http_service, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


class Service:
    """A reward service: the length of each response, after some failures."""

    def __init__(self, failures=(), results=None):
        self.failures = list(failures)
        self.results = results or (lambda batch: [len(item["response"]) for item in batch])
        self.batches = []
        self.tokens = set()

    def answer(self, handler):
        length = int(handler.headers["Content-Length"])
        batch = json.loads(handler.rfile.read(length))
        self.tokens.add(handler.headers.get("Authorization"))
        if self.failures:
            failure = self.failures.pop(0)
            if failure == "break":
                handler.connection.shutdown(socket.SHUT_RDWR)
                handler.close_connection = True
                return
            handler.send_response(failure)
            content = b"out of\norder"
        else:
            self.batches.append(batch)
            handler.send_response(200)
            result = self.results(batch)
            content = result if isinstance(result, bytes) else json.dumps(result).encode()
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


@contextlib.asynccontextmanager
async def judge(service, **config):
    """The client of a running service."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            service.answer(self)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    reward = HttpReward("judge", url, HttpRewardConfig.model_validate(config))
    try:
        async with asyncio.timeout(20):
            yield reward
    finally:
        await reward.close()
        server.shutdown()
        server.server_close()


async def ask(service, num_responses, **config):
    """The rewards of responses of 0, 1, 2 … letters."""
    async with judge(service, **config) as reward:
        asked = (reward.score(Response("x" * n, "")) for n in range(num_responses))
        return [score.reward for score in await asyncio.gather(*asked)]


async def test_responses_are_sent_in_batches_and_each_gets_its_own_score():
    service = Service()

    assert await ask(service, 50, batch_size=8, connections=2) == [float(n) for n in range(50)]

    sizes = [len(batch) for batch in service.batches]
    assert sum(sizes) == 50
    assert max(sizes) == 8
    assert len(sizes) <= 9


async def test_a_service_sees_everything_of_a_response():
    service = Service()
    facts = SampleFacts("p:1", "sums", "no?", num_tokens=9, num_turns=2, environment_tokens=3)
    turns = ("no", "sure?", "yes")

    async with judge(service) as reward:
        await reward.score(Response("yes", "2", facts, {"n": 1}, turns, state=[1]))

    [[item]] = service.batches
    sample = {
        **{"prompt_id": "p:1", "source": "sums", "prompt": "no?", "finish_reason": "stop"},
        **{"num_tokens": 9, "num_turns": 2, "environment_tokens": 3},
    }
    asked = {"response": "yes", "answer": "2", "sample": sample, "row": {"n": 1}}
    assert item == {**asked, "turns": ["no", "sure?", "yes"], "state": [1]}


async def test_failures_that_may_pass_are_repeated():
    service = Service(failures=[503, "break", 429, 500])

    assert await ask(service, 3) == [0.0, 1.0, 2.0]
    assert service.failures == []


@pytest.mark.parametrize(
    ("failure", "problem"), [(503, "HTTP 503: out of order"), ("break", "disconnected")]
)
async def test_a_service_that_stays_away_is_one_line_after_the_patience(failure, problem):
    with pytest.raises(RewardError, match=rf"reward 'judge': {URL} .* 0.1 s .*{problem}"):
        await ask(Service(failures=[failure] * 1000), 1, patience_s=0.1)


async def test_an_answer_that_takes_too_long_is_repeated_and_then_told():
    release = threading.Event()
    service = Service(results=lambda batch: release.wait(5) and [0 for _ in batch])
    with pytest.raises(RewardError, match=r"no answer within 0.1 s"):
        await ask(service, 1, timeout_s=0.1, patience_s=1.5)
    release.set()
    assert len(service.batches) >= 2


async def test_a_service_that_trickles_its_answer_takes_no_longer_than_one_that_is_silent():
    written: list[int] = []

    class Trickling(Service):
        def answer(self, handler):
            handler.rfile.read(int(handler.headers["Content-Length"]))
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            with contextlib.suppress(OSError):
                for number in range(1000):
                    handler.wfile.write(b" ")
                    written.append(number)
                    time.sleep(0.02)

    with pytest.raises(RewardError, match=r"gave no scores for 0 s \(no answer within 0.2 s\)"):
        await ask(Trickling(), 1, timeout_s=0.2, patience_s=0)
    assert len(written) < 500


async def test_a_response_that_comes_as_the_last_sender_ends_is_sent():
    async with judge(Service(), connections=1) as reward:
        scores = [await reward.score(Response("x" * n, "")) for n in range(3)]
    assert [score.reward for score in scores] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "refuses .HTTP 404: out of order.; correct the url"), (401, "token_variable")],
)
async def test_a_refusal_is_not_repeated(status, message):
    service = Service(failures=[status, 500])
    with pytest.raises(RewardError, match=message):
        await ask(service, 1)
    assert service.failures == [500]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda batch: [1.0], "must be a list of 2 results, got 1 results"),
        (lambda batch: {"rewards": []}, "must be a list of 2 results, got no list"),
        (lambda batch: [1.0, "x"], "'reward' must be a number, got str"),
        (lambda batch: [1.0, None], "'reward' must be a number, got NoneType"),
        (lambda batch: b"[1.0, NaN]", "'reward' must be finite"),
        (lambda batch: b"<html>", "not valid JSON"),
        (lambda batch: b"[" * 100_000, "not valid JSON"),
    ],
)
async def test_an_answer_of_another_form_is_one_line(results, message):
    with pytest.raises(RewardError, match=f"unusable answer of {URL}: .*{message}"):
        await ask(Service(results=results), 2)


async def test_the_token_comes_from_the_environment_and_is_never_logged(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TOKEN", "very-secret")
    service = Service(failures=[500])

    await ask(service, 1, token_variable="JUDGE_TOKEN")

    assert service.tokens == {"Bearer very-secret"}
    assert "very-secret" not in caplog.text


async def test_a_response_that_is_cancelled_before_it_is_sent_is_not_sent():
    service = Service()

    async with judge(service, batch_size=1, connections=1) as reward:
        tasks = [asyncio.create_task(reward.score(Response("x" * n, ""))) for n in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        assert (await tasks[1]).reward == 1.0

    assert [[item["response"] for item in batch] for batch in service.batches] == [["x"]]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [(b"[1.0, 2.0]", r"2\.0"), (b"<", f"reward 'judge': unusable answer of {URL}: not valid JSON")],
)
async def test_a_response_that_is_cancelled_on_its_way_leaves_the_others_their_outcome(
    result, outcome
):
    release = threading.Event()
    service = Service(results=lambda batch: release.wait(5) and result)

    async with judge(service, batch_size=2, connections=1) as reward:
        tasks = [asyncio.create_task(reward.score(Response("x", ""))) for _ in range(2)]
        while not service.batches:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        release.set()
        [_, second] = await asyncio.gather(*tasks, return_exceptions=True)

    assert re.match(outcome, str(getattr(second, "reward", second)))


async def test_closing_ends_what_waits():
    release = threading.Event()
    service = Service(results=lambda batch: release.wait(5) and [0 for _ in batch])

    async with judge(service, batch_size=1, connections=1) as reward:
        tasks = [asyncio.create_task(reward.score(Response("x", ""))) for _ in range(3)]
        while not service.batches:
            await asyncio.sleep(0.01)
    release.set()

    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RewardError] * 3
