"""Replaces Lightning's trainer by eventloop's, for libraries that create trainers themselves."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer

from eventloop_lightning.trainer import Trainer

# Modules in which the name stays Lightning's own: they define or extend the class.
_PREFIXES = ("eventloop_lightning.", "lightning.pytorch.", "pytorch_lightning.")
_PUBLIC = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.trainer",
           "pytorch_lightning.trainer")  # fmt: skip


def install(
    *,
    settings: Mapping[str, Any] | None = None,
    algorithms: Sequence[object] = (),
    watchers: Sequence[object] = (),
) -> None:
    """Replaces Lightning's `Trainer` in all modules of this process, loaded or still to be imported.

    Subclasses, such as the trainer of scvi-tools, are rebased onto the new class.

    Args:
        settings, algorithms, watchers: defaults for each trainer, as in `Trainer`.
    """
    defaults = {"settings": settings, "algorithms": algorithms, "watchers": watchers}

    class Installed(Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**defaults, **arguments})

    Installed.__name__ = Installed.__qualname__ = "Trainer"
    # Libraries inspect the signature of either class, to pass on arguments.
    Installed.__init__.__signature__ = inspect.signature(Trainer.__init__)  # type: ignore[attr-defined]
    for base in (
        LightningTrainer,
        *(subclass for subclass in Trainer.__subclasses__() if _is_ours(subclass)),
    ):
        for kind in base.__subclasses__():
            if kind is not Trainer and not kind.__module__.startswith(_PREFIXES):
                kind.__bases__ = tuple(
                    Installed if parent is base else parent for parent in kind.__bases__
                )
    for name, module in [*sys.modules.items()]:
        if name not in _PUBLIC and name.startswith(_PREFIXES):
            continue
        for attribute, value in [*getattr(module, "__dict__", {}).items()]:
            if value is LightningTrainer or _is_ours(value):
                setattr(module, attribute, Installed)


def _is_ours(value: object) -> bool:
    """Whether `install` made a class, in this call or an earlier one."""
    is_made = isinstance(value, type) and value.__module__ == __name__
    return is_made and issubclass(value, Trainer)  # type: ignore[arg-type]
