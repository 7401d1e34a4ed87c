"""Calls the hooks of callbacks and module in Lightning's order, and those alone that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

Function = Callable[..., Any]


class HookCalls:
    """The hooks that a run's callbacks and its module implement.

    Lightning calls each hook of each callback; here what is inherited empty isn't called.

    Args:
        trainer: whose callbacks and module they are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._known: dict[str, tuple[list[Function], Function | None]] = {}

    def refresh(self) -> None:
        """Looks at the callbacks again: what has been added since is called from now on."""
        self._known.clear()

    def tell(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a hook of the callbacks, then of the module; returns the module's result."""
        callbacks, own = self._known.get(name) or self._look_up(name)
        if not callbacks and own is None:
            return None
        module = self._module
        trainer = self._trainer
        # Without the search for a parameter or a buffer that a module's assignments begin with.
        attributes = vars(module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        for function in callbacks:
            function(trainer, module, *args, **kwargs)
        result = None if own is None else own(*args, **kwargs)
        attributes["_current_fx_name"] = before
        return result

    def tell_epoch_end(self) -> None:
        """Calls `on_train_epoch_end`; of callbacks that watch a metric after the module's.

        A metric that the module logs there is one that they may watch.
        """
        name = "on_train_epoch_end"
        module = self._module
        trainer = self._trainer
        before = module._current_fx_name
        module._current_fx_name = name
        watching = [one for one in trainer.callbacks if isinstance(one, EarlyStopping | Checkpoint)]
        for one in trainer.callbacks:
            if one not in watching:
                getattr(one, name)(trainer, module)
        module.on_train_epoch_end()
        for one in watching:
            getattr(one, name)(trainer, module)
        module._current_fx_name = before

    def own(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module, under its name for `self.log`."""
        attributes = vars(self._module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        result = getattr(self._module, name)(*args, **kwargs)
        attributes["_current_fx_name"] = before
        return result

    def is_own(self, name: str) -> bool:
        """Returns whether the module has a method of its own instead of Lightning's."""
        return is_overridden(self._module, name, LightningModule)

    def _look_up(self, name: str) -> tuple[list[Function], Function | None]:
        own = getattr(self._module, name, None) if self.is_own(name) else None
        found = overridden(self._trainer.callbacks, name), own
        self._known[name] = found
        return found


def overridden(callbacks: Sequence[Callback], name: str) -> list[Function]:
    """Returns this hook of those callbacks that have one of their own."""
    return [getattr(one, name) for one in callbacks if is_overridden(one, name, Callback)]


def is_overridden(thing: object, name: str, parent: type) -> bool:
    """Returns whether an object's method isn't the one that its parent class has."""
    if name in vars(thing):
        return True
    return getattr(type(thing), name, None) is not getattr(parent, name, None)
