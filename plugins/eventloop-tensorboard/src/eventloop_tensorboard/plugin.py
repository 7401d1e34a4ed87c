"""The plugin: writes the events of a run."""

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

    They are in the folder tensorboard of the run; `tensorboard --logdir runs` shows all runs.

    Args:
        histograms: interval of histograms of parameters and their gradients, as a time, starting with
            the first batch; none for no histograms.

    Raises:
        ValueError: `histograms` is not a time.
    """

    def __init__(self, *, histograms: Time | None = Time("1ep")) -> None:  # noqa: B008 - can't change
        self.histograms = None if histograms is None else Time(histograms)
        self._interval: Time | None = None
        self._file: EventFile | None = None
        self._has_begun = False
        self._on_the_way: deque[OnTheWay] = deque()
        # Events of the latest step: a resumed run hides everything from this step on, and writes them again.
        self._step = -1
        self._events: list[Event] = []

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Resolves the path early, because a task may change the working directory."""
        self._file = EventFile(RunFolder(state.run_dir.absolute()), "tensorboard")

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Starts writing; hides the events after the checkpoint from which the run resumes."""
        yield
        if self.histograms is not None:
            self._interval = state.resolve(self.histograms)
            bounds_on(state.device)  # now, because the first call synchronizes with the device
        # The run's lock is held by now, so no other process writes to the folder.
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
        """Measures parameters and gradients, if it is due; the values stay on the device."""
        clock = state.clock
        if self._interval is not None and (not clock.batch or clock.crossed(self._interval)):
            step = clock.batch + 1
            # A batch may have several updates, each with its own gradients: only the first is measured.
            measured_tags = {
                tag for pending in self._on_the_way if pending.step == step for tag in pending.tags
            }
            tensors = {
                tag: tensor for tag, tensor in _tensors(state.model) if tag not in measured_tags
            }
            if tensors:
                measured = measure(list(tensors.values()))
                self._on_the_way.append(OnTheWay(step, list(tensors), measured))

    @hookimpl(rank_zero=True)
    def batch_checkpoint(self, state: StateView) -> None:
        """Writes the histograms that have arrived on the host.

        Raises:
            SettingError: the interval is in tokens, but there are none.
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
        """Writes the remaining histograms."""
        self._write_all_histograms()

    @hookimpl
    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._file is not None:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the events of the latest step; a resumed run writes everything after it again."""
        self._write_all_histograms()
        timeless = [Event(step=event.step, summary=event.summary) for event in self._events]
        return {
            # Times differ between two runs that are otherwise equal.
            "of_this_run": {"wall_times": [event.wall_time for event in self._events]},
            "step": self._step,
            "events": [event.SerializeToString(deterministic=True) for event in timeless],
        }

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the events of the latest step, which are written again when training resumes."""
        self._step = state["step"]
        self._events = [*map(Event.FromString, state["events"])]
        # In older checkpoints the events have their times.
        if "of_this_run" in state:
            for event, wall_time in zip(
                self._events, state["of_this_run"]["wall_times"], strict=True
            ):
                event.wall_time = wall_time

    def _begin(self, file: EventFile, state: StateView) -> None:
        """Writes hyperparameters into a new folder, and the event that joins this process to earlier ones."""
        if file.is_first():
            results = [f"train/{name}" for name in state.metrics["train"]]
            results += named_metrics(state.metrics)
            options = hyperparameters(state.manifest)
            start = hparams(options, dict.fromkeys(("train/loss", *results)))  # type: ignore[no-untyped-call]
            self._append([_event(0, summary) for summary in start])
        batch = state.clock.batch
        hidden_from = self._step if self._events else batch + bool(batch)
        self._append([start_of_process(hidden_from), *self._events])

    def _write_all_histograms(self) -> None:
        while self._on_the_way:
            self._write_histograms()

    def _write_histograms(self) -> None:
        measured = self._on_the_way.popleft()
        self._write(measured.step, measured.histograms())

    def _write(self, step: int, summaries: Iterable[Summary]) -> None:
        events = [_event(step, summary) for summary in summaries]
        if step > self._step:
            self._step = step
            self._events = []
        if step == self._step:
            self._events += events
        self._append(events)

    def _append(self, events: Iterable[Event]) -> None:
        assert self._file is not None
        try:
            self._file.append(*(event.SerializeToString() for event in events))
        except OSError as error:
            raise PluginError(
                f"events can't be written to {self._file.folder}: {error.strerror or error}",
                fix="free space, give another run_dir, or switch the plugin off with "
                + switch_off("tensorboard"),
            ) from error


def _event(step: int, summary: Summary) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)


def _number(name: str, value: float) -> Summary:
    """Returns a number in the format that all readers support, float32.

    A double would be stored as a tensor, which the reader in the tensorboard package doesn't hide when a
    run is resumed (tensorboard 2.21).
    """
    # An unpaired surrogate can't be encoded, and an int may exceed the range of floats.
    tag = name.encode("utf-8", "replace").decode("utf-8")
    if abs(value) > _MOST:
        value = math.inf if value > 0 else -math.inf
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors for histograms; of a sharded tensor this rank's part."""
    for name, param in model.named_parameters():
        for kind, tensor in (("parameters", param), ("gradients", param.grad)):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            is_dense = tensor is not None and tensor.layout == torch.strided
            if tensor is not None and is_dense and tensor.is_floating_point() and tensor.numel():
                yield f"{kind}/{name}", tensor
