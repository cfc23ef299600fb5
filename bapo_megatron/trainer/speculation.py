"""Whether the next update's loss pass runs with a predicted decision (docs/algorithm.md).

A prediction that is right saves the forward-only pass, a wrong one costs a second loss pass. What
is counted here is equal on all ranks, so that all decide alike.
"""

import time
from collections import deque

import torch

from bapo_megatron.config.objectives import Speculate
from bapo_megatron.runtime.distributed import ProcessGroups, broadcast_bytes
from bapo_megatron.telemetry.console import say

TRIAL_UPDATES = 2
"""Updates in the order without predictions with which ``auto`` begins: the two passes are timed and
their log-probs compared."""

WINDOW = 32
"""Number of the newest predictions whose misses count."""


class Speculation:
    """Counts predictions, and says whether to rely on the next one."""

    def __init__(self, mode: Speculate, groups: ProcessGroups) -> None:
        """Begin with the trial, if there is one."""
        self._mode, self._groups = mode, groups
        self._missed: deque[bool] = deque(maxlen=WINDOW)
        self._trials_left = TRIAL_UPDATES if mode == "auto" else 0
        self._break_even = 1.0

    @property
    def predicts(self) -> bool:
        """Whether updates are predicted at all."""
        return self._mode != "never"

    @property
    def is_trial(self) -> bool:
        """Whether the next update belongs to the trial."""
        return self._trials_left > 0

    @property
    def relies(self) -> bool:
        """Whether the loss pass of the next update runs with the prediction.

        A pass without gradients that takes the share x of a loss pass pays for x misses per update.
        """
        if self._mode == "auto":
            misses_paid_for = self._break_even * len(self._missed)
            return not self.is_trial and sum(self._missed) < misses_paid_for
        return self._mode == "always"

    def count(self, *, missed: bool) -> None:
        """Count a prediction, whether or not the update relied on it."""
        self._missed.append(missed)

    def clock_s(self) -> float:
        """Return the time in seconds; in the trial, when the device has finished."""
        if self.is_trial and self._groups.device.type == "cuda":
            torch.cuda.synchronize(self._groups.device)
        return time.perf_counter()

    def end_trial(self, forward_only_s: float, loss_s: float, *, differs: bool) -> None:
        """Take in an update of the trial; a collective of all ranks.

        Args:
            forward_only_s: Time of the pass without gradients. That of rank 0 counts; of several
                trials the one in which the pass took the smallest share, since the first warms up.
            loss_s: Time of the loss pass.
            differs: Whether the two passes gave different statistics.
        """
        self._trials_left -= 1
        own = None if self._groups.rank else (forward_only_s / loss_s).hex().encode()
        share = float.fromhex(broadcast_bytes(own, self._groups).decode())
        self._break_even = min(self._break_even, share)
        if differs:
            self._mode, self._trials_left = "never", 0
            if self._groups.rank == 0:
                say(
                    "decisions are not predicted (speculate: auto): the passes with and without "
                    "gradients give different log-probs on this device (docs/algorithm.md)"
                )
