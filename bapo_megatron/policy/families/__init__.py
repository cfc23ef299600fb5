"""The model families, one per file; ``base`` says what a family is.

Each file lists its families in ``FAMILIES``, and all files are read here.
"""

import importlib
import pkgutil

from bapo_megatron.policy.architecture import Family

FAMILIES: dict[str, Family] = {}
"""By config.json's ``model_type``."""

for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    FAMILIES |= {family.model_type: family for family in getattr(_module, "FAMILIES", ())}
