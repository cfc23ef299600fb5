"""What rank 0 asks of the collector during a push: ``send`` calls, ``receive`` answers.

    begin → [join] → receive | take, bucket by bucket → finish → [verify] → resume

An attempt that fails is answered with the reason as soon as one server has failed: only when rank 0
has left the collective do the others come out of it. The next attempt takes the failed ones out and
starts again with the rest, first by ``load``: one call for weights on the disk.
"""

from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.runtime.calls import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The servers that take part in an attempt."""

    addresses: tuple[str, ...]
    num_ranks: tuple[int, ...]
    """Tensor-parallel ranks of each."""
    gpus: tuple[tuple[int, ...], ...]
    """The GPU of each of these ranks, as rank 0 numbers them; () where that is not known."""
    share_group: bool
    """Whether all of them have joined one group and were never lost since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Have the servers receive and load the bucket that rank 0 broadcasts meanwhile."""

    bucket: BucketLayout
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Have each server load a bucket from memory that it maps."""

    payloads: tuple[tuple[str, ...], ...]
    """For each server, in the order of ``Opened``, one for each of its ranks."""
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Have the servers load a Hugging Face directory; generation stays paused."""

    model_dir: Path
    version: int


BEGIN = Call("weights.begin", int, Opened)
"""Start an attempt to push this version: pause generation, choose and prepare servers."""
JOIN = Call("weights.join", GroupPlace, str | None)
"""Have the servers join the group of rank 0, which has this place, and the servers those after it,
in the order of ``Opened``; answered when it is complete. The response to this call and the next
three is why the first server failed; None: all have done their part."""
RECEIVE = Call("weights.receive", Receive, str | None)
TAKE = Call("weights.take", Take, str | None)
FINISH = Call("weights.finish", None, str | None)
"""Check that all servers report the version, and admit them; generation stays paused."""
LOAD = Call("weights.load", Load, None)
PROBE = Call("weights.probe", None, tuple[tuple[int, ...], ...])
"""Return the token ids of the sequences that the servers are compared on."""
VERIFY = Call("weights.verify", tuple[tuple[float, ...], ...], float | None)
"""Compare every server's log-probs of the probe with the trainer's: those of all tokens of each
sequence but the first, at temperature 1. Answered with the largest mean absolute difference, in
nats, of the servers that stay; None where none stays because none answered: they may come back, and
need the weights."""
RESUME = Call("weights.resume", None, float)
"""Let generation continue; answered with the seconds for which it stood still since the last
``RESUME``, 0 if nothing was generated. The last call of every push."""
