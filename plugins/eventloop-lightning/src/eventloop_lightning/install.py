"""Puts eventloop's trainer in the place of Lightning's, for libraries that make one by themselves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer

from eventloop_lightning.trainer import Trainer

# Modules in which the name stays Lightning's own: they define or extend the class.
_KEPT = ("eventloop_lightning.", "lightning.pytorch.", "pytorch_lightning.")
_PUBLIC = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.trainer",
           "pytorch_lightning.trainer")  # fmt: skip


def install(
    *,
    settings: Mapping[str, Any] | None = None,
    algorithms: Sequence[object] = (),
    watchers: Sequence[object] = (),
) -> None:
    """Replaces Lightning's `Trainer` in all modules of this process, loaded or still to be imported.

    Args:
        settings, algorithms, watchers: of each trainer that is made; as `Trainer` takes them.
    """
    defaults = {"settings": settings, "algorithms": algorithms, "watchers": watchers}

    class Installed(Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**defaults, **arguments})

    Installed.__name__ = Installed.__qualname__ = "Trainer"
    for name, module in [*sys.modules.items()]:
        if name not in _PUBLIC and name.startswith(_KEPT):
            continue
        for attribute, value in [*getattr(module, "__dict__", {}).items()]:
            is_installed = isinstance(value, type) and value.__module__ == __name__
            if value is LightningTrainer or (is_installed and issubclass(value, Trainer)):
                setattr(module, attribute, Installed)
