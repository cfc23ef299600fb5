"""Ends a run whose servers fail again and again before anything is finished.

A prompt that crashes its server is sent again after each restart, once the trainer has pushed the
weights; without a limit that goes on for ever.
"""

from __future__ import annotations

from bapo_megatron.errors import RolloutError

MOST_PUSHES = 5
"""In a row, of weights that servers have lost, without a result in between."""


class PushLimit:
    """Counts how often the trainer is asked for weights that it has pushed before."""

    def __init__(self) -> None:
        self._num_pushes = 0
        self._num_results = -1

    def count(self, num_results: int, servers: str, logs: str) -> None:
        """The trainer is asked once more.

        Args:
            num_results: Responses, also of evaluations, that were finished since the start.
            servers: Which servers there are, and why they lack the weights, for people.
            logs: Where they say why they failed.

        Raises:
            RolloutError: It was asked ``MOST_PUSHES`` times since the last result.
        """
        if num_results != self._num_results:
            self._num_pushes, self._num_results = 0, num_results
        if self._num_pushes == MOST_PUSHES:
            raise RolloutError(
                f"the weights were pushed {MOST_PUSHES} times in a row, and each time every server "
                f"failed before anything was finished: {servers}; a prompt or a setting seems to "
                f"crash them: see {logs}, correct it (rollout.server, data) and continue with "
                "resume=true"
            )
        self._num_pushes += 1
