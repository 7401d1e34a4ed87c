"""Process-wide settings of a run: deterministic kernels, memory layout, garbage collection."""

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

# Makes cuBLAS use the same workspace each time. Without it, deterministic torch raises on CUDA.
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE = ":4096:8"


class Deterministic:
    """Makes torch compute bit-identical results in every run, until the trainer is closed.

    An operation without a deterministic implementation raises a RuntimeError with its name. `close`
    restores torch's previous settings.
    """

    def __init__(self) -> None:
        self._previous_settings: tuple[bool, bool, bool, str | None] | None = None

    @hookimpl
    def header_note(self) -> str:
        return (
            "deterministic: without kernels whose order varies, the search for the fastest "
            "convolution (cudnn.benchmark), and channels_last"
        )

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        self._previous_settings = (
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
        if self._previous_settings is None:
            return
        enabled, warn_only, benchmark, workspace = self._previous_settings
        self._previous_settings = None
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_WORKSPACE_VARIABLE, None)


class TunedConvolutions:
    """Lets cuDNN benchmark its convolutions for the first batch of each shape, and use the fastest.

    The choice depends on measured times, so two runs may differ in their last bits.
    """

    def __init__(self) -> None:
        self._previous_benchmark: bool | None = None

    @hookimpl(wrapper=True)
    def build_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        self._previous_benchmark = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        return (yield)

    @hookimpl
    def close(self) -> None:
        if self._previous_benchmark is not None:
            torch.backends.cudnn.benchmark = self._previous_benchmark
            self._previous_benchmark = None


class ChannelsLast:
    """Converts the weights of 2-D convolutions to channels_last, which is fast in reduced precision.

    A convolution with channels_last weights returns channels_last outputs for inputs of any layout, and
    so do the layers after it, so batches don't need to be converted. Shapes, values and the state dict
    don't change.

    Args:
        precision: the precision of the run, for the header.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision.name
        self._note = ""

    @hookimpl(wrapper=True)
    def wrap_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        """Converts the weights, in place, before any plugin shards or copies them."""
        convolutions = [
            module
            for module in state.model.modules()
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
        ]
        for convolution in convolutions:
            convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in no stub
        wrapped = yield
        # Count afterwards, since sharding may have changed the layout.
        num = 0
        for convolution in convolutions:
            weight = convolution.weight
            if isinstance(weight, Tensor):
                num += weight.is_contiguous(memory_format=torch.channels_last)
        layers = counted(num, "convolution")
        self._note = f"channels_last: {layers}, because of {self._precision}" if num else ""
        return wrapped

    @hookimpl
    def header_note(self) -> str:
        return self._note


class GarbageCollection:
    """Runs garbage collection at multiples of an interval, and disables Python's automatic collection.

    Automatic collections happen at different times on each rank, and every one of them makes all other
    ranks wait. The first collection of a run freezes all existing objects, so that later collections
    only scan newer objects and are fast. The tenth collection scans all objects, which takes as long as
    many steps. It happens once per process, and not at all if the objects of imports were frozen before
    the run was opened, as the command does. Before the first collection, between fits and after the
    last fit, automatic collection is enabled as before.

    Args:
        interval: how often to collect.

    Attributes:
        has_looked_at_all: whether a run of this process has scanned all objects.
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
        """Converts an interval that is a fraction of an epoch or of the run to batches.

        Raises:
            SettingError: the interval is a fraction of an unknown length.
        """
        self._interval = resolved("gc_interval", self._interval, state)
        # Most objects come from imports and aren't garbage. If they are frozen already, as the command
        # does, a full collection would find nothing.
        self._looks_at_all = gc.get_freeze_count() == 0

    @hookimpl
    def before_dataloader(self, state: State) -> None:
        # Here, and not after the batch, so that objects of the last batch and its events are free, too.
        if state.clock.crossed(self._interval):
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
