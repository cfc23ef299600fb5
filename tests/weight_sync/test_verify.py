"""What comparing the servers with the trainer finds, and for how long generation stands still."""

import asyncio
import functools
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.engine.pooled import EngineState
from bapo_megatron.errors import RolloutError
from bapo_megatron.weight_sync.verify import Comparison
from tests.distributed_launch import run_ranks
from tests.fakes.fake_weight_server import LOGPROB, FakeWeightServer
from tests.policy.tiny_models import make_model
from tests.weight_sync.ranks import Broken, sync_broken
from tests.weight_sync.setting import PROBE, sync_on


async def test_servers_that_compute_as_the_trainer_does_are_kept(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers) as setting:
        await setting.load()
        assert await setting.receiver.probe(None) == PROBE
        resumed = await setting.receiver.resume(((LOGPROB + 0.03, LOGPROB), (LOGPROB - 0.03,)))
        assert resumed.difference == pytest.approx(0.02)
        assert setting.states == ["usable", "usable"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (LOGPROB + 0.2, "log-probs differ"),
        (None, "log-probs differ"),
        (float("nan"), "unusable answer"),  # no JSON
    ],
)
async def test_a_server_that_computes_otherwise_serves_nobody(
    servers: list[FakeWeightServer], wrong: float | None, reason: str
) -> None:
    servers[1].logprob = wrong
    async with sync_on(servers) as setting:
        assert (await setting.compare()).difference == 0.0
        assert setting.states == ["usable", "lost"]
        assert reason in setting.reason(1)


async def test_if_every_server_computes_otherwise_the_run_ends(
    servers: list[FakeWeightServer],
) -> None:
    for server in servers:
        server.logprob = LOGPROB + 0.2
    async with sync_on(servers) as setting:
        with pytest.raises(RolloutError, match=r"by 0\.2 .*verify_tolerance"):
            await setting.compare()


async def test_a_sampler_with_rounded_weights_differs_but_serves_and_one_line_says_so(
    servers: list[FakeWeightServer], caplog: pytest.LogCaptureFixture
) -> None:
    rollout = {"engine": "local", "local": {"sampling_bits": 4}}
    async with sync_on(servers[:1], **rollout) as setting:
        for shift in (0.2, 0.3):  # the trainer moves, and rounded weights stay
            resumed = await setting.compare(((LOGPROB + shift,) * 2, (LOGPROB + shift,)))
            assert resumed.difference == pytest.approx(shift)
        assert setting.states == ["usable"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "weights rounded to 4 bits move log-probs by 0.2 on average, which is no error "
        "(rollout.local.sampling_bits)"
    ]


async def test_servers_that_end_during_the_probe_do_not_end_the_run(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].hanging.add("/generate")
    async with sync_on(servers[:1], weight_sync={"timeout_s": 1}) as setting:
        assert (await setting.compare()).difference is None
        assert setting.states == ["lost"]
        assert "does not answer the probe" in setting.reason(0)


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
async def test_the_pause_lasts_from_the_stop_of_generation_until_it_goes_on(
    servers: list[FakeWeightServer], in_flight: str
) -> None:
    servers[1].delay_s = 0.3
    async with sync_on(servers, weight_sync={"in_flight": in_flight}) as setting:
        clock_s = asyncio.get_running_loop().time
        started_s = clock_s()
        await setting.load()
        loaded_s = clock_s() - started_s
        assert setting.generation.calls == ["pause"]
        servers[0].logprob = LOGPROB + 0.2
        resumed = await setting.receiver.resume(((LOGPROB, LOGPROB), (LOGPROB,)))
        assert 0.3 <= resumed.pause_s <= clock_s() - started_s
        if in_flight == "retract":  # requests that are paused go on before the probe
            assert resumed.pause_s < loaded_s + 0.05
        assert set(setting.generation.calls[1:]) == {"resume"}
        setting.generation.is_running = False
        assert (await setting.compare(version=8)).pause_s == 0.0


async def test_by_default_only_servers_that_are_new_or_came_back_are_compared(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers, weight_sync={"verify": "first"}) as setting:

        async def scored(version: int) -> list[int]:
            """What each server had to score up to this weight sync."""
            await setting.compare(version=version)
            return [server.paths.count("/generate") for server in servers]

        second = setting.pool.engines[1]
        assert await scored(1) == [2, 2]
        assert await scored(2) == [2, 2]
        setting.pool.mark_lost(second, "it restarts")
        assert await scored(3) == [2, 2]
        second.state = EngineState.STALE  # it answers again
        assert await scored(4) == [2, 4]
        setting.pool.mark_lost(second, "it restarts")
        second.state, servers[1].logprob = EngineState.STALE, LOGPROB + 0.2
        assert await scored(5) == [2, 6]
        assert setting.states == ["usable", "lost"]


@pytest.mark.parametrize(
    ("verify", "expected"), [(2, [2, 2, 4, 4, 6]), ("every", [2, 4, 6, 8, 10]), ("none", [0] * 5)]
)
async def test_a_number_compares_every_so_many_weight_syncs_and_none_compares_nothing(
    servers: list[FakeWeightServer], verify: int | str, expected: list[int]
) -> None:
    async with sync_on(servers, weight_sync={"verify": verify}) as setting:
        for version, num_scored in enumerate(expected, start=1):
            await setting.compare(version=version)
            assert [server.paths.count("/generate") for server in servers] == [num_scored] * 2


ABSENT = "; muting {} does nothing on the server: their weights do not arrive"
OTHERWISE = "; it vanishes without {}: check config.json and kernels for them"
OPEN = "; no kind of layer alone explains it"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "broken", "options", "cause"),
    [
        ("qwen2", Broken(keeps=".self_attn."), {}, ABSENT.format("attention")),
        ("qwen2", Broken(scales="self_attn.o_proj"), {"tensor": 2}, OTHERWISE.format("attention")),
        ("qwen3_moe", Broken(scales="mlp.experts"), {}, OTHERWISE.format("experts")),
        *(
            pytest.param("qwen2", *case, marks=pytest.mark.exhaustive)
            for case in (
                (Broken(keeps=".mlp."), {"tensor": 2}, ABSENT.format("MLPs")),
                (Broken(scales="mlp.down_proj"), {}, OTHERWISE.format("MLPs")),
                (Broken(scales="mlp.down_proj"), {"lora_rank": 2}, OTHERWISE.format("MLPs")),
                (Broken(scales="model.norm"), {}, OPEN),
            )
        ),
    ],
)
def test_if_no_server_computes_as_the_trainer_does_the_kind_of_layer_that_differs_is_named(
    family: str, broken: Broken, options: dict[str, int], cause: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "model")
    sync = functools.partial(sync_broken, **options)
    num_ranks, method = options.get("tensor", 1), "disk" if options else "broadcast"
    ranks = run_ranks(sync, num_ranks, model, tmp_path, [broken], method)
    assert [weights_stayed for _, weights_stayed in ranks] == [True] * len(ranks)
    assert ranks[0][0].startswith("local: its log-probs differ from the trainer's by")
    assert ranks[0][0].endswith(f"or raise the tolerance{cause}")
    assert all(error.endswith("or raise the tolerance") for error, _ in ranks[1:])


@pytest.mark.distributed
def test_a_server_that_computes_otherwise_beside_a_right_one_is_lost_without_a_search(
    tmp_path: Path,
) -> None:
    model = make_model("qwen2", tmp_path / "model")
    engines = [Broken(), Broken(scales="mlp.down_proj")]
    assert run_ranks(sync_broken, 1, model, tmp_path, engines, "disk") == [("", True)]


def drawn(seed: int, scale: float) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(512)


@pytest.mark.parametrize("change", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("mismatch", [0.0, 1e-6, 0.03])
def test_a_server_that_repeats_its_log_probs_while_the_trainer_s_move_has_no_new_weights(
    change: float, mismatch: float
) -> None:
    start = drawn(0, 1.0)
    server = start + drawn(1, mismatch)
    before = Comparison(server, start)
    assert before.shows_no_change_of(Comparison(server, start + drawn(2, change)))
    hardly = server + drawn(3, 0.05 * change)
    assert before.shows_no_change_of(Comparison(hardly, start + drawn(2, change)))


@pytest.mark.parametrize("change", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("rounding", [0.0, 1e-6, 5e-3])
def test_new_weights_raise_no_alarm_however_both_sides_round(
    change: float, rounding: float
) -> None:
    """In bfloat16 a change of weights rounds each side anew, by more than it changes them."""
    start, moved = drawn(0, 1.0), drawn(0, 1.0) + drawn(1, change)
    before = Comparison(start + drawn(2, rounding), start + drawn(3, rounding))
    after = Comparison(moved + drawn(4, rounding), moved + drawn(5, rounding))
    assert not before.shows_no_change_of(after)


def test_a_trainer_that_does_not_move_shows_nothing() -> None:
    start = drawn(0, 1.0)
    before = Comparison(start + drawn(1, 0.01), start)
    assert not before.shows_no_change_of(before)
    assert not before.shows_no_change_of(Comparison(before.server, start + drawn(2, 1e-6)))
