"""Makes this package work for `pytorch_lightning` where that is what the code has imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_THEIRS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


@contextmanager
def either_lightning() -> Iterator[None]:
    """While the modules of this package are imported, gives `lightning.pytorch` its other name.

    Both packages have the same code, and classes of their own: a trainer of one refuses modules of the
    other. What a process has imported first counts. Outside of the block `lightning` is what it was.
    """
    if "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
        yield
        return
    aliases = {"lightning": ModuleType("lightning")}
    for name, module in [*sys.modules.items()]:
        package, _, rest = name.partition(".")
        if package in _THEIRS:
            aliases[f"{_THEIRS[package]}.{rest}".strip(".")] = module
    sys.modules.update(aliases)
    try:
        yield
    finally:
        for name in aliases:
            del sys.modules[name]
