"""The plugin: when sequences are short, and that the clock counts what is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import Any, Literal

from eventloop import Count, PluginError, State, Time, hookimpl
from eventloop.toolbox import Ramp, inputs_of, refusal, split, switch_off
from eventloop_seq_length_warmup.sequences import full_length, length_at, reshape, truncate


class SeqLengthWarmup:
    """Trains on short sequences first; they grow to their whole length over a part of the run.

    The clock counts the tokens that are trained on. Evaluation sees whole sequences.

    Args:
        min_length: tokens a sequence at first.
        duration: when sequences are whole, counted from the start of the run: any time, or a
            fraction of the run, `"0.3dur"`.
        length_increment: lengths are multiples of it, which suits matrix units, and keeps them few.
        mode: truncate leaves the rest of each sequence out; reshape makes several short sequences of
            one, so that a batch keeps its tokens.

    Raises:
        TypeError: an option is of another type.
        ValueError: a value makes no sense.

    Source: Li et al. 2021, arXiv:2108.06084.
    """

    def __init__(
        self,
        *,
        min_length: int = 8,
        duration: Time | str = "0.3dur",
        length_increment: int = 8,
        mode: Literal["truncate", "reshape"] = "truncate",
    ) -> None:
        for name, given in {"min_length": min_length, "length_increment": length_increment}.items():
            if isinstance(given, bool) or not isinstance(given, int):
                raise TypeError(f"{name}={given!r} is not a whole number of tokens")
            if given < 1:
                raise ValueError(f"{name}={given} is less than one token")
        if mode not in ("truncate", "reshape"):
            raise ValueError(f"mode={mode!r} is neither 'truncate' nor 'reshape'")
        self.min_length = min_length
        self.duration = Time(duration)
        self.length_increment = length_increment
        self.mode = mode
        self._growth: Ramp | None = None

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no sequences, or a model that takes no shorter ones; None if it can."""
        try:
            full = full_length(state.batch)
        except ValueError as error:
            return str(error)
        if not self._can_be_timed(state):
            return "sequences grow over a share of the run, whose max_duration isn't set"
        length = length_at(full, self.min_length, self.length_increment, 0.0)
        if length == full:
            return f"sequences of {full} tokens are no longer than the shortest"
        whole = split(state.batch, 1)[0]
        refused = refusal(state.model, inputs_of(truncate(whole, length)), inputs_of(whole))
        if refused is None:
            return None
        reason = str(refused).partition("\n")[0]
        return f"the model doesn't take sequences of {length} tokens: {reason}"

    @hookimpl
    def after_load(self, state: State) -> None:
        """Learns how long the warm-up is, now that the length of the run is known."""
        if self._can_be_timed(state):
            self._growth = Ramp.between(None, self.duration, state)

    @hookimpl(wrapper=True)
    def count_batch(self, state: State, batch: Any) -> Generator[None, Count, Count]:
        """Counts the shortened batch, on the host; samples are those that the loader returned."""
        count = yield
        if state.batch is not None:  # a part of a batch that has been shortened
            return count
        shorter = self._shortened(state, batch)
        if shorter is batch:
            return count
        counted: Count = state.again(shorter)
        return counted._replace(samples=count.samples)

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Makes the sequences shorter, before any other plugin sees them."""
        shorter = self._shortened(state, state.batch)
        if shorter is not state.batch:
            state.batch = shorter
            state.log("seq-length-warmup/length", full_length(shorter))

    @hookimpl
    def training_end(self, state: State) -> None:
        """Warns if the run has seen no whole sequences."""
        may_warn = state.rank == 0 and state.stop_reason is None and state.duration is not None
        if may_warn and self._growth is not None and self._growth.frac(state) < 1:
            warnings.warn(
                "seq-length-warmup: the run ended before sequences reached full length, "
                f"duration={self.duration}; "
                'give a shorter duration, as a fraction of the run for example: "0.5dur"',
                stacklevel=2,
            )

    def _shortened(self, state: State, batch: Any) -> Any:
        assert self._growth is not None
        done = self._growth.frac(state)
        if done >= 1:
            return batch
        try:
            full = full_length(batch)
        except ValueError as error:
            raise PluginError(
                f"seq-length-warmup can't shorten a batch: {error}",
                fix="let the data loader give tokens and targets of shape (B, T), or switch it off "
                "with " + switch_off("seq-length-warmup"),
            ) from error
        length = length_at(full, self.min_length, self.length_increment, done)
        if length == full:
            return batch
        return truncate(batch, length) if self.mode == "truncate" else reshape(batch, length)

    def _can_be_timed(self, state: State) -> bool:
        return state.duration is not None or self.duration.unit != "dur"
