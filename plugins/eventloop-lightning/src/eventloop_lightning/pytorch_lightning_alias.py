"""Makes this package work with `pytorch_lightning`, if the user's code has imported that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_THEIRS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


@contextmanager
def either_lightning() -> Iterator[None]:
    """Resolves imports of `lightning` to `pytorch_lightning` if that was imported first.

    Both packages have the same code but separate classes: a trainer of one refuses modules of the other.
    The package that the process imported first is used. After the block, `lightning` is restored.
    """
    first_imported = next(
        (name for name in sys.modules if name in ("lightning.pytorch", *_THEIRS)), None
    )
    if first_imported not in _THEIRS or "pytorch_lightning" not in sys.modules:
        yield
        return
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "lightning"
    }
    aliases = {"lightning": ModuleType("lightning")}
    for name, module in [*sys.modules.items()]:
        package, _, submodule = name.partition(".")
        if package in _THEIRS:
            aliases[f"{_THEIRS[package]}.{submodule}".strip(".")] = module
    for name in modules:
        del sys.modules[name]
    sys.modules.update(aliases)
    try:
        yield
    finally:
        for name in aliases:
            del sys.modules[name]
        sys.modules.update(modules)
