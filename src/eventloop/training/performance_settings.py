"""What a run switches on in its process: kernels, the layout of memory, garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from eventloop.errors import counted
from eventloop.hook_markers import hookimpl
from eventloop.training.bookkeeping import resolved

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.state import State
    from eventloop.training.precision import Precision

# With this, cuBLAS uses the same workspace each time; torch refuses to be deterministic without.
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE = ":4096:8"


class Deterministic:
    """Makes torch compute the same bits each time, until the trainer is closed.

    An operation that can't raises a RuntimeError that names it. `close` restores torch's earlier
    settings.
    """

    def __init__(self) -> None:
        self._found: tuple[bool, bool, bool, str | None] | None = None

    @hookimpl
    def header_note(self) -> str:
        return (
            "deterministic: without kernels whose order varies, the search for the fastest "
            "convolution (cudnn.benchmark), and channels_last"
        )

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        self._found = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(_WORKSPACE_VARIABLE),
        )
        os.environ.setdefault(_WORKSPACE_VARIABLE, _WORKSPACE)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        return (yield)

    @hookimpl
    def close(self) -> None:
        if self._found is None:
            return
        enabled, warn_only, benchmark, workspace = self._found
        self._found = None
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_WORKSPACE_VARIABLE, None)


class TunedConvolutions:
    """Lets cuDNN try its convolutions on the first batch of each shape, and keep the fastest.

    It chooses by time, so that two runs may differ in the last bits.
    """

    def __init__(self) -> None:
        self._found: bool | None = None

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        self._found = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        return (yield)

    @hookimpl
    def close(self) -> None:
        if self._found is not None:
            torch.backends.cudnn.benchmark = self._found
            self._found = None


class ChannelsLast:
    """Keeps the weights of 2-D convolutions in the layout in which reduced precision is fast.

    A convolution whose weights are channels_last computes and answers in this layout whatever its
    input's is, and so do the layers after it: no batch has to be converted. Shapes, values and
    state dict stay.

    Args:
        precision: for the header.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision.name
        self._note = ""

    @hookimpl(wrapper=True)
    def wrap_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        """Converts the weights, in place, before any plugin shards or copies them."""
        convolutions = [
            one for one in state.model.modules() if isinstance(one, (nn.Conv2d, nn.ConvTranspose2d))
        ]
        for one in convolutions:
            one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in no stub
        wrapped = yield
        # Who shards them may need another layout.
        weights = [one.weight for one in convolutions if isinstance(one.weight, Tensor)]
        num = sum(one.is_contiguous(memory_format=torch.channels_last) for one in weights)
        layers = counted(num, "convolution")
        self._note = f"channels_last: {layers}, because of {self._precision}" if num else ""
        return wrapped

    @hookimpl
    def header_note(self) -> str:
        return self._note


class GarbageCollection:
    """Collects at multiples of an interval, and keeps Python from doing so in between.

    Left alone, Python looks through all objects at moments of its own, which differ between ranks:
    each then waits for all others in turn. At the first multiple what is there is frozen, so that
    later collections look at what came since and cost little. The tenth looks at everything, which takes as
    long as many steps: once a process, and never where the objects of imports are frozen when the run is
    opened, as a command freezes them. Until the first, between two fits and after the last, Python
    collects as it did before.

    Args:
        interval: how often to collect.

    Attributes:
        has_looked_at_all: whether a run of this process has looked at everything.
    """

    __slots__ = ("_interval", "_looks_at_all", "_num_done", "_was_enabled")

    has_looked_at_all: ClassVar[bool] = False

    def __init__(self, interval: Time) -> None:
        self._interval = interval
        self._num_done = 0
        self._looks_at_all = True
        self._was_enabled = False

    @hookimpl
    def after_load(self, state: State) -> None:
        """Turns fractions of an epoch or of the run into batches.

        Raises:
            SettingError: it is a fraction of an unknown length.
        """
        self._interval = resolved("gc_interval", self._interval, state)
        # Imports make most objects, and leave little garbage. Who froze them has said that they stay.
        self._looks_at_all = gc.get_freeze_count() == 0

    @hookimpl
    def before_dataloader(self, state: State) -> None:
        if state.clock.crossed(self._interval):  # what came after the last batch is gone, too
            self._collect()

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._release()

    @hookimpl
    def exception(self, state: State, error: BaseException) -> None:
        self._release()

    @hookimpl
    def close(self) -> None:
        """Enables Python's garbage collector again, for all objects."""
        self._release()
        if self._num_done:
            gc.unfreeze()
            self._num_done = 0

    def _collect(self) -> None:
        self._num_done += 1
        looks_at_all = self._num_done == 10 and self._looks_at_all
        looks_at_all = looks_at_all and not GarbageCollection.has_looked_at_all
        if looks_at_all:
            GarbageCollection.has_looked_at_all = True
            gc.unfreeze()
        gc.collect(1 if self._num_done == 1 else 2)
        if self._num_done == 1 or looks_at_all:
            gc.freeze()
        if gc.isenabled():
            gc.disable()
            self._was_enabled = True

    def _release(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False
