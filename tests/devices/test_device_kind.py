"""Accelerators by the modules that torch has for them, which here are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eventloop.devices.device_kind import Accelerator

CPU = torch.device("cpu")


@pytest.fixture
def kind(monkeypatch):
    """Makes the kind of a device whose module has these names; its tensors are the CPU's."""

    def kind(*, pins=True, **names):
        module = SimpleNamespace(**names)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr("eventloop.devices.device_kind._can_pin", lambda: pins)
        made = Accelerator(torch.device("xpu", 0))
        made.device = CPU
        return made

    return kind


class Recorded:
    """An event that knows how it was made, and behind which stream."""

    def __init__(self, *, enable_timing):
        self.is_timed, self.stream = enable_timing, None

    def record(self, stream):
        self.stream = stream


STREAMS = {
    "Stream": object,
    "stream": object,
    "Event": Recorded,
    "current_stream": lambda device: f"stream of {device}",
}


def test_an_event_is_behind_the_stream_that_computes(kind):
    event = kind(**STREAMS).record(timed=True)

    assert (event.is_timed, event.stream) == (True, "stream of cpu")


@pytest.mark.parametrize("lacks", ["pinned memory", *STREAMS])
def test_without_streams_or_pinned_memory_copies_wait(lacks, kind):
    """As on Apple's GPUs; the header says so."""
    names = {name: value for name, value in STREAMS.items() if name != lacks}
    slow = kind(pins=lacks != "pinned memory", **names)
    tensor = torch.ones(3)

    copy = slow.host_copy(tensor, buffer=torch.zeros(3))
    tensor.zero_()

    assert slow.streams is None
    assert slow.record() is None
    assert copy.tolist() == [1, 1, 1]
    assert "copies wait" in slow.describe()


def test_a_buffer_is_used_again_if_it_fits(kind, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, dtype: made.append(dtype)
                        or empty(*shape, dtype=dtype))  # fmt: skip
    fast = kind(**STREAMS)
    first = fast.host_copy(torch.ones(2))

    assert fast.host_copy(torch.zeros(2), first) is first
    assert fast.host_copy(torch.zeros(3), first) is not first
    assert fast.host_copy(torch.zeros(2, dtype=torch.int64), first) is not first
    assert made == [torch.float32, torch.float32, torch.int64]


def test_the_random_state_is_the_modules(kind):
    states = {}
    own = kind(
        get_rng_state=lambda device: states.get(device, "fresh"),
        set_rng_state=lambda state, device: states.update({device: state}),
    )

    own.set_rng_state("later")

    assert own.get_rng_state() == "later"


def test_memory_is_counted_where_the_module_counts(kind):
    counted = kind(memory_allocated=lambda _: 1, memory_reserved=lambda _: 2,
                   max_memory_allocated=lambda _: 3)  # fmt: skip

    assert counted.memory() == {"allocated": 1, "reserved": 2, "peak": 3}
    assert kind(memory_allocated=lambda _: 1).memory() == {}


def test_without_float64_sums_are_in_float32(kind, monkeypatch):
    """The header says so: a mean over many batches has fewer digits."""
    poor = kind(**STREAMS, get_device_name=lambda device: "M4")
    monkeypatch.setattr("eventloop.devices.device_kind._supports", lambda dtype, device: False)

    assert poor.sum_dtype is torch.float32
    assert poor.describe() == "M4; sums in float32: it has no float64"
    assert kind(**STREAMS).describe() == "sums in float32: it has no float64"


@pytest.mark.parametrize(
    ("names", "precision"),
    [({}, "fp32"), ({"is_bf16_supported": lambda: False}, "fp32"),
     ({"is_bf16_supported": lambda: True}, "bf16")],
)  # fmt: skip
def test_auto_precision_is_bf16_where_the_module_says_so(names, precision, kind):
    assert kind(**names).best_precision() == precision


@pytest.mark.about_cpu
def test_what_a_module_lacks_is_left_out(kind):
    """`torch.mps` has neither `set_device` nor `is_initialized`."""
    bare = kind()

    bare.select()

    assert bare.is_opened() == torch.accelerator.is_available()


def test_plain_tensors_are_of_the_class_that_the_device_makes(kind, monkeypatch):
    """A device that is implemented in Python has tensors of a class of its own."""

    class OfDevice(torch.Tensor):
        pass

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).as_subclass(OfDevice))

    assert kind().tensor_class is OfDevice
