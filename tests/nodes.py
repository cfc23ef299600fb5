"""Machines of a cluster: network namespaces, joined by a bridge."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

INTERFACE = "node0"
"""Name of each machine's network interface."""
_BRIDGE = f"bapo{os.getpid()}"
_NETWORK = f"10.213.{os.getpid() % 256}"
"""Tests may run in several processes."""


@dataclass(frozen=True)
class Node:
    """One machine, with an address of its own and a loopback interface that no other one sees."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command line begins with to run on it."""
        return ("ip", "netns", "exec", self.name)


@contextmanager
def make_nodes(count: int) -> Iterator[list[Node]]:
    """Make machines that this one reaches; skip the test where the system does not allow it."""
    with ExitStack() as stack:
        try:
            _ip("link", "add", _BRIDGE, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces for this user: {error}")
        stack.callback(_ip, "link", "delete", _BRIDGE)
        _ip("address", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        yield [stack.enter_context(_node(number)) for number in range(count)]


@contextmanager
def _node(number: int) -> Iterator[Node]:
    node = Node(f"{_BRIDGE}-{number}", f"{_NETWORK}.{number + 2}")
    cable = f"{_BRIDGE}-{number}"
    _ip("netns", "add", node.name)
    try:
        _ip(
            *("link", "add", cable, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", node.name),
        )
        try:
            _ip("link", "set", cable, "master", _BRIDGE, "up")
            for command in (
                ("address", "add", f"{node.address}/24", "dev", INTERFACE),
                ("link", "set", INTERFACE, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-netns", node.name, *command)
            yield node
        finally:
            # A namespace goes later than the command that deletes it, and its end of the cable too.
            _ip("link", "delete", cable)
    finally:
        _ip("netns", "delete", node.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL)
