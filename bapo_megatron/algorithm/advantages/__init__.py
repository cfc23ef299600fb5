"""The built-in advantages (docs/objectives.md).

Each is a function that gets the rewards R and the lengths (sampled tokens) of all responses of a
batch, and returns A, [P, G] float64 each. Sums over the batch must be exact, so that the order of
groups does not matter. All files of this package are read here for their ``NAMED``; none imports
torch outside functions, because the configuration reads the names.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from bapo_megatron.algorithm.advantages.responses import SHIFTED as SHIFTED

NAMED: dict[str, Callable[..., Any]] = {}
"""The advantages by the name that ``algorithm.advantage`` gives them."""

for _file in pkgutil.iter_modules(__path__):
    NAMED |= importlib.import_module(f"{__name__}.{_file.name}").NAMED
