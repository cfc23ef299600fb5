"""The model families, one per file; ``base`` says what a family is.

Each file lists its families in ``FAMILIES``, and all files are read here.
"""

import importlib
import pkgutil

from bapo_megatron.policy.architecture import Family

FAMILIES: dict[str, Family] = {}
"""By config.json's ``model_type``."""
TITLES: dict[str, str] = {}
"""First lines of their files, by ``model_type``."""

for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    for _family in getattr(_module, "FAMILIES", ()):
        FAMILIES[_family.model_type] = _family
        TITLES[_family.model_type] = str(_module.__doc__).partition("\n")[0]
