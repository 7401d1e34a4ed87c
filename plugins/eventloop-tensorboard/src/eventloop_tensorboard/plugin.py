"""The plugin: what is written into the events of a run, and when."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard.summary import hparams

from eventloop import Moment, PluginError, SettingError, Time, hookimpl
from eventloop.toolbox import RunFolder, as_option, named_metrics, switch_off
from eventloop_tensorboard.files import EventFile, start_of_process
from eventloop_tensorboard.histograms import OnTheWay, bounds_on, measure
from eventloop_tensorboard.hyperparameters import hyperparameters
from eventloop_tensorboard.texts import summary_of

if TYPE_CHECKING:
    from eventloop import StateView

_MOST = torch.finfo(torch.float32).max


class Tensorboard:
    """Writes logged numbers, texts, histograms and hyperparameters for TensorBoard.

    They are in the folder tensorboard of the run's; `tensorboard --logdir runs` shows all runs.

    Args:
        histograms: how often parameters and their gradients are shown as histograms, as a time,
            beginning with the first batch. none: never.

    Raises:
        ValueError: `histograms` is not a time.
    """

    def __init__(self, *, histograms: Time | None = Time("1ep")) -> None:  # noqa: B008 - can't change
        self.histograms = None if histograms is None else Time(histograms)
        self._interval: Time | None = None
        self._file: EventFile | None = None
        self._has_begun = False
        self._on_the_way: deque[OnTheWay] = deque()
        # Of the latest step: a resumed run hides everything from it on, and writes these again.
        self._step = -1
        self._events: list[Event] = []

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Settles where the events go, for a task may change the working directory."""
        self._file = EventFile(RunFolder(state.run_dir.absolute()), "tensorboard")

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Starts writing; hides what the run wrote after the checkpoint that it resumes from."""
        yield
        if self.histograms is not None:
            self._interval = state.resolve(self.histograms)
            bounds_on(state.device)  # a step would wait for it
        # The run's lock is taken by now: no other process is about to write.
        if self._file is not None and not self._has_begun:
            self._has_begun = True
            self._begin(self._file, state)

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Writes the numbers."""
        if self._file is None:  # the trainer failed before it was complete
            return
        self._write(at.batch, [_number(name, value) for name, value in numbers.items()])

    @hookimpl(rank_zero=True)
    def log_text(
        self, state: StateView, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Writes the texts and tables."""
        if self._file is not None:
            self._write(at.batch, [summary_of(name, text) for name, text in texts.items()])

    @hookimpl(rank_zero=True)
    def after_train_batch(self, state: StateView) -> None:
        """Measures parameters and gradients, if it is time; they stay on the device."""
        clock = state.clock
        if self._interval is not None and (not clock.batch or clock.crossed(self._interval)):
            step = clock.batch + 1
            # A batch may have several updates, each with gradients of its own.
            before = {tag for one in self._on_the_way if one.step == step for tag in one.tags}
            tensors = {tag: one for tag, one in _tensors(state.model) if tag not in before}
            if tensors:
                measured = measure(list(tensors.values()))
                self._on_the_way.append(OnTheWay(step, list(tensors), measured))

    @hookimpl(rank_zero=True)
    def batch_checkpoint(self, state: StateView) -> None:
        """Writes the histograms that have arrived on the host.

        Raises:
            SettingError: they are to come every so many tokens, but there are none.
        """
        if self._interval is not None and self._interval.unit == "tok" and not state.clock.token:
            raise SettingError(
                f"tensorboard.histograms is {self._interval}, but tokens aren't counted",
                fix="give Task(num_tokens=lambda inputs: inputs.numel()), say, or write it in "
                "batches: " + as_option("tensorboard", histograms="100ba"),
            )
        while self._on_the_way and self._on_the_way[0].is_there():
            self._write_histograms()

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        """Writes the histograms that are left."""
        self._write_all_histograms()

    @hookimpl
    def close(self) -> None:
        """Closes the file, if one was opened."""
        if self._file is not None:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the events of the latest step; what is written later, a resumed run writes again."""
        self._write_all_histograms()
        timeless = [Event(step=one.step, summary=one.summary) for one in self._events]
        return {
            "of_this_run": {"wall_times": [one.wall_time for one in self._events]},
            "step": self._step,
            "events": [one.SerializeToString(deterministic=True) for one in timeless],
        }

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the events of the latest step, which are written again when training resumes."""
        self._step = state["step"]
        self._events = [*map(Event.FromString, state["events"])]
        # In older checkpoints the events have their times.
        if "of_this_run" in state:
            for event, at in zip(self._events, state["of_this_run"]["wall_times"], strict=True):
                event.wall_time = at

    def _begin(self, file: EventFile, state: StateView) -> None:
        """Writes hyperparameters into a new folder, and what makes the numbers one curve."""
        if file.is_first():
            results = [f"train/{name}" for name in state.metrics["train"]]
            results += named_metrics(state.metrics)
            options = hyperparameters(state.manifest)
            start = hparams(options, dict.fromkeys(("train/loss", *results)))  # type: ignore[no-untyped-call]
            self._append([_event(0, one) for one in start])
        batch = state.clock.batch
        hidden_from = self._step if self._events else batch + bool(batch)
        self._append([start_of_process(hidden_from), *self._events])

    def _write_all_histograms(self) -> None:
        while self._on_the_way:
            self._write_histograms()

    def _write_histograms(self) -> None:
        one = self._on_the_way.popleft()
        self._write(one.step, one.histograms())

    def _write(self, step: int, summaries: Iterable[Summary]) -> None:
        events = [_event(step, one) for one in summaries]
        if step > self._step:
            self._step = step
            self._events = []
        if step == self._step:
            self._events += events
        self._append(events)

    def _append(self, events: Iterable[Event]) -> None:
        assert self._file is not None
        try:
            self._file.append(*(one.SerializeToString() for one in events))
        except OSError as error:
            raise PluginError(
                f"events can't be written to {self._file.folder}: {error.strerror or error}",
                fix="free space, give another run_dir, or switch the plugin off with "
                + switch_off("tensorboard"),
            ) from error


def _event(step: int, summary: Summary) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)


def _number(name: str, value: float) -> Summary:
    """Returns a number as every reader knows it: a float32.

    In double precision it would be a tensor, which the reader of the package doesn't take back when
    a run is resumed (tensorboard 2.21).
    """
    # Half a surrogate pair is not a text, and a number may be larger than any float.
    tag = name.encode("utf-8", "replace").decode("utf-8")
    if abs(value) > _MOST:
        value = math.inf if value > 0 else -math.inf
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what histograms are made of; of a sharded tensor this rank's part."""
    for name, param in model.named_parameters():
        for kind, one in (("parameters", param), ("gradients", param.grad)):
            if isinstance(one, DTensor):
                one = one.to_local()
            is_dense = one is not None and one.layout == torch.strided
            if one is not None and is_dense and one.is_floating_point() and one.numel():
                yield f"{kind}/{name}", one
