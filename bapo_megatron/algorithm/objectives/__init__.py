"""The built-in objectives, each in one file with its loss and its options (docs/objectives.md).

A file of this package lists its objectives in ``NAMED``, and all files are read here, so that a new
objective costs one file. The configuration is a layer below and finds ``SECTIONS`` at run time, by
this package's name (``config.schema``). Files here therefore import torch, and modules that import
it, inside functions only: reading a configuration must not wait for torch.
"""

import importlib
import pkgutil

from bapo_megatron.algorithm.objective import NamedObjective
from bapo_megatron.config.section import Section

NAMED: dict[str, NamedObjective] = {}
"""The objectives by the name that ``algorithm.objective`` gives them."""

for _file in pkgutil.iter_modules(__path__):
    NAMED |= importlib.import_module(f"{__name__}.{_file.name}").NAMED

SECTIONS: dict[str, type[Section]] = {
    entry.key or name: entry.options for name, entry in NAMED.items() if entry.options
}
"""Their options, by the key of ``algorithm`` that holds them."""
