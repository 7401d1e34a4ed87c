"""The plugin: when the averages move, and where they replace the weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError, SettingError, State, StepOutcome, Time, hookimpl
from eventloop.toolbox import FIELDS, UNITS, as_option
from eventloop_ema.averages import Averages, averaged_names
from eventloop_ema.maths import half_life_of, share_of

_HALF_LIFE = "1000ba"


class Ema:
    """Evaluates, predicts and exports with an exponential moving average of the weights.

    Training continues with the original weights. Float buffers, such as statistics of batch norms, are
    averaged, too.

    Args:
        half_life: amount of training after which old weights count for half: "100ba", "2ep", "0.05dur",
            in any unit of time. 1,000 batches if neither this nor `decay` is set.
        decay: share of the old average that stays at each step, in (0, 1), instead of a half-life.
            0.99 has a half-life of 69 batches, 0.999 of 693.
        rampup: upper limit of the half-life as a share of the training so far, in [0, 1], so that the
            average of a young run isn't dominated by its first weights; 0 for a constant half-life.
        update_every: number of batches between moves; a move covers all of these batches, and `decay`
            is the share that stays at each move.

    Raises:
        TypeError: `decay`, `rampup` or `update_every` is not a number.
        ValueError: both half-life and decay are set, or a value is out of range.

    Source: Tarvainen & Valpola 2017, arXiv:1703.01780, section 2; the ramp-up: Karras et
    al. 2020, arXiv:2006.06676, in the authors' code.
    """

    def __init__(
        self,
        *,
        half_life: str | None = None,
        decay: float | None = None,
        rampup: float = 0.05,
        update_every: int = 1,
    ) -> None:
        if half_life is not None and decay is not None:
            raise ValueError(f"half_life={half_life!r} and decay={decay!r} say the same; give one")
        for name, value in (("decay", decay), ("rampup", rampup)):
            if value is not None and not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not a number")
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"decay={decay!r} isn't between 0 and 1; 0.99, say")
        if not 0 <= rampup <= 1:
            raise ValueError(f"rampup={rampup!r} isn't in [0, 1]; 0.05, say")
        if type(update_every) is not int:
            raise TypeError(f"update_every={update_every!r} is not a number of batches")
        if update_every < 1:
            raise ValueError(f"update_every={update_every!r} is less than 1")
        self.half_life = Time(half_life or _HALF_LIFE)
        self.decay = decay
        self.rampup = rampup
        self.update_every = update_every
        self.averages: Averages | None = None
        self._length = 0.0
        self._unit = "ba"
        self._names: list[str] = []
        self._loaded: dict[str, Any] = {}
        self._stepped: bool | Tensor = False
        self._moved_at = 0.0  # how much had been trained when the averages last moved

    @hookimpl(wrapper=True)
    def restore_model(self, state: State) -> Generator[None, bool, bool]:
        """Replaces the averages when other weights are loaded: with their averages, if they have any."""
        loaded = self._loaded
        self._loaded = {}
        is_restored = yield
        self.averages = None
        self._go_on_from(loaded, state)
        return is_restored

    @hookimpl
    def after_load(self, state: State) -> None:
        """Chooses the weights to average and resolves the half-life; a resumed run continues its averages."""
        loaded = self._loaded
        self._loaded = {}
        if self.decay is not None:
            self._length = half_life_of(self.decay)
        else:
            self._length, self._unit = _in_clock_units(self.half_life, state)
        groups = (
            group for optimizer in state.optimizers.values() for group in optimizer.param_groups
        )
        stepped = [param for group in groups for param in group["params"]]
        self._names = averaged_names(state.model, stepped)
        self._go_on_from(loaded, state)

    @hookimpl(wrapper=True)
    def train_batch(self, state: State) -> Generator[None, bool | StepOutcome, bool | StepOutcome]:
        """Records whether a step was made, under fp16 as a tensor, because only the device knows it yet."""
        stepped = yield
        self._stepped = (
            stepped
            if isinstance(stepped, bool)
            else torch.stack([*state.precision.found_inf()]).amax() == 0
        )
        return stepped

    @hookimpl(trylast=True)
    def batch_end(self, state: State) -> None:
        """Moves the averages after a step; the first step initializes them."""
        stepped = self._stepped
        self._stepped = False
        if stepped is False:
            return
        if self.averages is None:
            self.averages = Averages(state.model, self._names)
            self._moved_at = self._trained(state)
        elif self.update_every == 1:
            self.averages.update(self._share(state) * stepped)
        elif state.clock.batch % self.update_every == 0:
            # Under fp16 some steps in between may have been skipped: too few to matter here.
            self.averages.update(self._share_of_several(state))
            self._moved_at = self._trained(state)

    @hookimpl(wrapper=True)
    def evaluate(self, state: State) -> Generator[None, Any, Any]:
        """Evaluates with the averages."""
        with self._averaged():
            return (yield)

    @hookimpl(wrapper=True)
    def predict(self, state: State) -> Generator[None, Any, Any]:
        """Predicts with the averages."""
        with self._averaged():
            return (yield)

    @hookimpl(wrapper=True)
    def export(self, state: State) -> Generator[None, Path, Path]:
        """Exports the averages."""
        with self._averaged():
            return (yield)

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by name, none before the first step, and when they last moved."""
        averages = self.averages.state_dict() if self.averages else {}
        return {"averages": averages, "moved_at": self._moved_at}

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        """Stores the averages until the model's weights are loaded."""
        self._loaded = state

    def _go_on_from(self, loaded: dict[str, Any], state: State) -> None:
        averages = loaded.get("averages")
        if averages:
            self._names = list(averages)
            self.averages = Averages(state.model, self._names)
            self.averages.load_state_dict(averages)
            self._moved_at = loaded.get("moved_at", self._trained(state))

    def _averaged(self) -> AbstractContextManager[None]:
        return self.averages.in_place() if self.averages else nullcontext()

    def _trained(self, state: State) -> float:
        """Returns the amount of training so far, in the unit of the half-life."""
        trained: float = getattr(state.clock, FIELDS[self._unit])
        return trained

    def _share(self, state: State) -> float:
        """Returns the share of the new weights for this batch."""
        previously_trained = getattr(state.clock.previous, FIELDS[self._unit])
        trained = self._trained(state)
        return share_of(self._half_life_at(trained), trained - previously_trained)

    def _share_of_several(self, state: State) -> float:
        """Returns the share of the new weights for all batches since the last move."""
        trained = self._trained(state)
        if self.decay is not None:
            return share_of(self._half_life_at(trained / self.update_every), 1)
        return share_of(self._half_life_at(trained), trained - self._moved_at)

    def _half_life_at(self, trained: float) -> float:
        if not trained:
            raise PluginError(
                f"ema.half_life is {self.half_life}, but the task counts no {UNITS[self._unit]}",
                fix="give Task(num_tokens=...), or " + as_option("ema", half_life="100ba"),
            )
        return min(self._length, self.rampup * trained) if self.rampup else self._length


def _in_clock_units(half_life: Time, state: State) -> tuple[float, str]:
    """Converts a half-life to a unit that every batch advances: not a fraction of the run, not epochs.

    Raises:
        SettingError: the length isn't known.
    """
    try:
        time = state.resolve(half_life)
        if time.unit != "ep":
            return time.value, time.unit
        if state.epoch_length is None:
            raise ValueError(f"{time} is in epochs, but the data loader has no length")
    except ValueError as error:
        raise SettingError(
            f"ema.half_life: {error}", fix="write " + as_option("ema", half_life="100ba")
        ) from None
    return time.value * state.epoch_length, "ba"
