"""What Lightning's own callbacks and loggers ask of the trainer is answered in a fit of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lit_cases import CASES, fitted

import eventloop_lightning

FOLDERS = ("callbacks", "core", "loggers", "utilities")


def attributes_asked() -> set[str]:
    """Returns the names of what is read of a `trainer` in Lightning's callbacks and loggers."""
    root = Path(pl.__file__).parent
    return {
        node.attr
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and "trainer" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
    }


class Asks(pl.Callback):
    """Reads each attribute in the middle of training."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.unanswered: dict[str, str] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.unanswered |= dict(self.not_answered(trainer))

    def not_answered(self, trainer: Any) -> Iterator[tuple[str, str]]:
        for name in sorted(self.names):
            try:
                getattr(trainer, name)
            except Exception as error:
                yield name, repr(error)


def asked_under(trainer: Any, names: set[str]) -> dict[str, str]:
    asks = Asks(names)
    fitted(trainer, CASES["plain"], callbacks=[asks], max_epochs=1)
    return asks.unanswered


def test_what_lightnings_callbacks_ask_of_the_trainer_is_answered():
    """Some fifty names; those that Lightning's own trainer doesn't answer there are the same."""
    names = attributes_asked()

    assert len(names) > 50
    assert asked_under(eventloop_lightning.Trainer, names) == asked_under(pl.Trainer, names)


def test_a_name_that_nothing_answers_would_show():
    """The control."""
    assert set(asked_under(eventloop_lightning.Trainer, {"current_epoch", "no_such"})) == {
        "no_such"
    }
