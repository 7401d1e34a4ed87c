"""Python's garbage collector, on the clock of the run: at the same batch on every rank."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from eventloop.errors import SettingError
from eventloop.hooks import hookimpl

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.state import State


class GarbageCollection:
    """Collects at multiples of an interval, and keeps Python from doing so in between.

    Left alone, Python looks through all objects at moments of its own, which differ between ranks:
    each then waits for all others in turn. At the first multiple what lives is frozen, so that
    later collections look at what came since and cost little. Until then, between two fits and
    after the last, Python collects as it did before.

    Args:
        interval: how often to collect.
    """

    note = ""

    __slots__ = ("_has_frozen", "_interval", "_was_enabled")

    def __init__(self, interval: Time) -> None:
        self._interval = interval
        self._has_frozen = False
        self._was_enabled = False

    @hookimpl
    def after_load(self, state: State) -> None:
        """Turns fractions of an epoch or of the run into batches.

        Raises:
            SettingError: it is a fraction of an unknown length.
        """
        try:
            self._interval = state.resolve(self._interval)
        except ValueError as error:
            fix = "write gc_interval in batches: 100ba"
            raise SettingError(f"gc_interval: {error}", fix=fix) from None

    @hookimpl
    def before_dataloader(self, state: State) -> None:
        """Collects when due: the last batch, and an evaluation or epoch's end after it, are gone."""
        if state.clock.crossed(self._interval):
            self._collect()

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Lets Python collect again."""
        self._release()

    @hookimpl
    def exception(self, state: State, error: BaseException) -> None:
        """Lets Python collect again."""
        self._release()

    @hookimpl
    def close(self) -> None:
        """Lets Python collect again, and everything."""
        self._release()
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False

    def _collect(self) -> None:
        gc.collect()
        if not self._has_frozen:
            gc.freeze()
            self._has_frozen = True
        if gc.isenabled():
            gc.disable()
            self._was_enabled = True

    def _release(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False
