"""Calls the hooks of callbacks and module in Lightning's order, skipping hooks without an override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

Function = Callable[..., Any]


class HookCalls:
    """The hooks that a run's callbacks and its module implement.

    Lightning calls each hook of each callback; here, inherited empty hooks are skipped.

    Args:
        trainer: the trainer with the callbacks and the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._known: dict[str, tuple[list[Function], Function | None]] = {}

    def refresh(self) -> None:
        """Reads the callbacks again, to include callbacks that were added since."""
        self._known.clear()

    def tell(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a hook of the callbacks, then of the module; returns the module's result."""
        callbacks, module_hook = self._known.get(name) or self._look_up(name)
        if not callbacks and module_hook is None:
            return None
        module = self._module
        trainer = self._trainer
        # Set in the dict: `nn.Module.__setattr__` first searches parameters and buffers, several times a batch.
        attributes = vars(module)
        previous_name = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        for function in callbacks:
            function(trainer, module, *args, **kwargs)
        result = None if module_hook is None else module_hook(*args, **kwargs)
        attributes["_current_fx_name"] = previous_name
        return result

    def tell_epoch_end(self) -> None:
        """Calls `on_train_epoch_end`; callbacks that watch a metric come after the module.

        They may watch a metric that the module logs in this hook.
        """
        name = "on_train_epoch_end"
        module = self._module
        trainer = self._trainer
        previous_name = module._current_fx_name
        module._current_fx_name = name
        watching = [
            callback
            for callback in trainer.callbacks
            if isinstance(callback, EarlyStopping | Checkpoint)
        ]
        for callback in trainer.callbacks:
            if callback not in watching:
                getattr(callback, name)(trainer, module)
        module.on_train_epoch_end()
        for callback in watching:
            getattr(callback, name)(trainer, module)
        module._current_fx_name = previous_name

    def own(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module, under its name for `self.log`."""
        attributes = vars(self._module)
        previous_name = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        result = getattr(self._module, name)(*args, **kwargs)
        attributes["_current_fx_name"] = previous_name
        return result

    def is_own(self, name: str) -> bool:
        """Whether the module overrides a method of LightningModule."""
        return is_overridden(self._module, name, LightningModule)

    def _look_up(self, name: str) -> tuple[list[Function], Function | None]:
        module_hook = getattr(self._module, name, None) if self.is_own(name) else None
        hooks = overridden(self._trainer.callbacks, name), module_hook
        self._known[name] = hooks
        return hooks


def overridden(callbacks: Sequence[Callback], name: str) -> list[Function]:
    """Returns this hook of the callbacks that override it."""
    return [
        getattr(callback, name) for callback in callbacks if is_overridden(callback, name, Callback)
    ]


def is_overridden(owner: object, name: str, parent: type) -> bool:
    """Whether an object overrides a method of its parent class."""
    if name in vars(owner):
        return True
    return getattr(type(owner), name, None) is not getattr(parent, name, None)
