"""Who reaches a run on one node: from another machine, nobody."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.launch import Launched, free_port
from tests.nodes import Node, make_nodes
from tests.trainer.chaos import wait_for

TRY_PORTS = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
        print(port)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Node, Node]]:
    """Two machines; without the right to make them, this one, reached by its address."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.delenv("GLOO_SOCKET_IFNAME", raising=False)
        try:
            first, second = stack.enter_context(make_nodes(2))
        except pytest.skip.Exception:
            first = second = Node("", own_address())
        yield first, second


def own_address() -> str:
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family.name == "AF_INET" and not address.address.startswith("127.")
    ]
    if not addresses:
        pytest.skip("no address but the loopback")
    return addresses[0]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [("bapo_megatron.torchrun", 2), ("torch.distributed.run", 1)]
)
def test_ports_of_a_run_are_reached_from_another_machine_only_with_torch_s_own_launcher(
    machines: tuple[Node, Node], tmp_path: Path, launcher: str, num_ranks: int
) -> None:
    victim, attacker = machines
    ports = tmp_path / "ports"
    ranks = ("--nproc-per-node", str(num_ranks), "-m", "tests.idle_rank", str(ports))
    environment = {"TMPDIR": str(tmp_path)}  # torch's own launcher leaves its logs
    run = Launched(program=[launcher, *ranks], environment=environment, node=victim.name)
    try:
        wait_for(run, ports.exists, "joined ranks", timeout_s=120)
        listening = ports.read_text().split()
        prefix = attacker.prefix if attacker.name else ()
        attack = subprocess.run(
            [*prefix, sys.executable, "-S", "-c", TRY_PORTS, victim.address, *listening],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait(60)
    open_to_all = attack.stdout.split()
    if launcher == "bapo_megatron.torchrun":
        assert len(listening) > 2  # the store's, and gloo's
        assert open_to_all == []
    else:  # its dynamic rendezvous has two stores; without them the other case would prove nothing
        assert len(open_to_all) >= 2


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_other_nodes(started: list[Launched]) -> None:
    address, port = own_address(), free_port()
    place = ["--node-rank", "0", "--master-addr", address, "--master-port", str(port)]
    process = Launched(program=["bapo_megatron.torchrun", "--nnodes", "2", *place, "never.py"])
    started.append(process)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((address, port)) == 0

    wait_for(process, listens, "store")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Be the launcher of one rank with these arguments."""
    from bapo_megatron import torchrun

    line = ["torchrun", *arguments, "--nproc-per-node", "1", "never.py"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process stays as it is
    monkeypatch.setattr(torchrun.rendezvous_handler_registry, "_registry", {})
    torchrun.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--standalone"], r"--standalone: the rendezvous is static"),
        (["--rdzv-backend", "c10d"], r"--rdzv-backend, .* is static"),
        (["--nnodes", "1:2"], r"--nnodes, .* give one number of nodes"),
        (
            ["--nnodes", "2", "--master-addr", "localhost"],
            r"--master-addr: localhost is 127\.0\.0\.1 on this node, which others",
        ),
        (
            ["--nnodes", "2", "--master-addr", "192.0.2.200"],
            r"cannot listen on 192\.0\.2\.200:29500 .*; give an address of the node",
        ),
    ],
)
def test_what_would_open_the_store_or_hide_it_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        launch(monkeypatch, *arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_term_exit_alike(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bapo_megatron import torchrun

    def stopped(args: object) -> None:
        raise torchrun.SignalException("", signal.Signals(number))

    monkeypatch.setattr(torchrun, "run", stopped)
    with pytest.raises(SystemExit) as ended:  # a text: exit status 1
        launch(monkeypatch)
    line = f"ended by {signal.Signals(number).name}; start all nodes of the run again"
    assert ended.value.code == f"bapo-megatron: {line}"


def test_after_the_first_signal_only_a_ctrl_c_that_follows_another_after_5_s_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bapo_megatron import torchrun

    clock = iter((100.0, 104.9, 105.1, 110.0))
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, torchrun._stop_once) for number in numbers}
    before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(torchrun.SignalException):
            signal.raise_signal(signal.SIGINT)
        for number in numbers:  # the terminal is closed
            signal.raise_signal(number)
        with pytest.raises(torchrun.SignalException):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same one
        assert 0 < signal.alarm(0) <= 30  # then ranks are killed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
