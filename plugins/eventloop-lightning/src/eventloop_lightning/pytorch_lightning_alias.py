"""Makes this package work for `pytorch_lightning` where that is what the code has imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_THEIRS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


@contextmanager
def either_lightning() -> Iterator[None]:
    """Resolves imports of `lightning` to `pytorch_lightning` if that was imported first.

    Both packages have the same code, and classes of their own: a trainer of one refuses modules of the
    other. What a process has imported first counts. Outside of the block `lightning` is what it was.
    """
    first = next((name for name in sys.modules if name in ("lightning.pytorch", *_THEIRS)), None)
    if first not in _THEIRS or "pytorch_lightning" not in sys.modules:
        yield
        return
    modules = {
        name: one for name, one in sys.modules.items() if name.partition(".")[0] == "lightning"
    }
    aliases = {"lightning": ModuleType("lightning")}
    for name, module in [*sys.modules.items()]:
        package, _, rest = name.partition(".")
        if package in _THEIRS:
            aliases[f"{_THEIRS[package]}.{rest}".strip(".")] = module
    for name in modules:
        del sys.modules[name]
    sys.modules.update(aliases)
    try:
        yield
    finally:
        for name in aliases:
            del sys.modules[name]
        sys.modules.update(modules)
