"""The bounds that a yoked run takes from the file of another run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from examples.study.yoked import RecordedBapo, YokedToFile
from tests.fakes.given_tokens import make_tokens

CHECK = {0: (9.0, 9.0)}
"""What the check of an objective sees before the first step."""


def record(file: Path, *parts: Mapping[int, tuple[float, float]]) -> None:
    """Let one start of a run see the updates of ``parts``, by number, with these bounds."""
    objective = RecordedBapo(str(file))
    zero_T = torch.zeros(4)
    tokens = make_tokens(zero_T, zero_T, zero_T)
    for part in parts:
        for update, limits in part.items():
            for _ in range(2):  # micro-batches
                objective.loss(replace(tokens, update=update, decision=torch.tensor(limits)))


def test_a_run_that_is_started_again_keeps_the_bounds_of_its_updates(tmp_path: Path) -> None:
    file = tmp_path / "seed1" / "bounds.jsonl"
    record(file, CHECK, {0: (0.5, 1.5), 1: (0.75, 2.0), 2: (0.5, 1.25)})
    record(file, CHECK, {2: (0.75, 3.0), 3: (0.5, 2.0)})  # from the checkpoint before update 2
    record(file, CHECK)  # it had ended
    yoked = YokedToFile(str(file).replace("seed1", "seed{partner}"), seed=0, seeds=2)
    zero_T = torch.zeros(4)
    tokens = make_tokens(zero_T, zero_T, zero_T)
    limits = [yoked.bounds(replace(tokens, update=update)) for update in range(4)]
    expected = [(0.5, 1.5), (0.5, 2.0), (0.75, 2.0), (0.75, 3.0)]
    assert sorted((float(low), float(high)) for low, high in limits) == expected
