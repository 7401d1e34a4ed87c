"""Patches for everything that torch's backend registration doesn't cover, while the device is on.

`torch.Stream`, `torch.Event`, `torch.Generator` and the functions of `torch.accelerator` create or use
objects of the device. Host memory can be pinned without a driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Private, but used for nested inputs by torch.export's documentation (torch 2.13).
from torch.utils._pytree import tree_map

from eventloop_testing.pretend import device_module, generators, memory, private, streams
from eventloop_testing.pretend.failing import raising_at_end
from eventloop_testing.pretend.tensor import DATA, PretendTensor, staying_on_host

_FACTORIES = ("empty", "empty_like", "empty_strided", "full", "full_like", "ones", "ones_like",
              "rand", "randn", "zeros", "zeros_like")  # fmt: skip


@contextmanager
def patched() -> Iterator[None]:
    """Enables streams, events, generators and pinned memory of the device inside its context."""
    with ExitStack() as stack:
        for name, function in _accelerator().items():
            stack.enter_context(mock.patch.object(torch._C, private.ACCELERATOR + name, function))
        for owner, name, value in _replaced():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _accelerator() -> dict[str, Callable[..., Any]]:
    """Returns the functions that `torch.accelerator` calls, by name."""
    module = device_module
    return {
        "getStream": module.current_stream,
        "setStream": module.set_stream,
        "synchronizeDevice": module.synchronize,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": module.empty_cache,
        "getDeviceStats": lambda index: _nested(module.memory_stats()),
        "resetPeakStats": module.reset_peak_memory_stats,
        "resetAccumulatedStats": module.reset_accumulated_memory_stats,
        "getMemoryInfo": module.mem_get_info,
        "setDeviceIndex": module.set_device,
        "getDeviceIndex": module.current_device,
    }


def _nested(flat: dict[str, int]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, leaf = name.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[leaf] = value
    return nested


def _replaced() -> Iterator[tuple[Any, str, Any]]:
    yield torch, "Stream", _also(torch.Stream, lambda **_: streams.Stream())
    yield (
        torch,
        "Event",
        _also(torch.Event, lambda enable_timing=False, **_: streams.Event(enable_timing)),
    )
    yield torch, "Generator", _also(torch.Generator, lambda **_: generators.Generator(), "cpu")
    run_backward = getattr(torch.autograd, private.RUN_BACKWARD)
    yield torch.autograd, private.RUN_BACKWARD, raising_at_end(run_backward)
    yield torch, "load", _loading(torch.load)
    yield Tensor, "data", property(DATA.__get__, _put)
    yield Tensor, "tolist", _read(Tensor.tolist)
    yield Tensor, "numpy", _refusing(Tensor.numpy)
    yield Tensor, "__repr__", _shown(Tensor.__repr__)
    yield Tensor, "pin_memory", _pinned
    yield Tensor, "is_pinned", lambda self, device=None: memory.is_pinned(self)
    for name in _FACTORIES:
        yield torch, name, _pinning(getattr(torch, name))


def _also(kind: type, make: Callable[..., Any], default: str = private.NAME) -> type:
    """Returns a class that makes objects of the device if asked for them, and objects of `kind` otherwise."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, kind)

        def __call__(cls, device: Any = None, **options: Any) -> Any:
            is_ours = torch.device(default if device is None else device).type == private.NAME
            if is_ours and "stream_id" not in options:
                return make(**options)
            return kind(**options) if device is None else kind(device=device, **options)

    return Meta(kind.__name__, (), {"__doc__": kind.__doc__})


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `torch.load` that can move the loaded values, in nested containers, to the device."""

    @functools.wraps(load)
    def read(file: Any, map_location: Any = None, **options: Any) -> Any:
        is_device = isinstance(map_location, (str, torch.device))
        if not is_device or torch.device(map_location).type != private.NAME:
            with staying_on_host(is_device):
                return load(file, map_location, **options)
        with staying_on_host(True):
            content = load(file, "cpu", **options)
        return tree_map(
            lambda value: value.to(map_location) if hasattr(value, "to") else value, content
        )

    return read


def _put(self: Tensor, value: Tensor) -> None:
    """Implements `x.data = y`, which moves x to the device if y is there, as on other devices."""
    if not isinstance(value, PretendTensor):
        DATA.__set__(self, value)
        return
    new_tensor: Tensor = value.detach()
    if isinstance(self, torch.nn.Parameter):
        new_tensor = torch.nn.Parameter(new_tensor, self.requires_grad)
    # torch refuses to set `data` to a tensor of another class.
    torch.utils.swap_tensors(self, new_tensor)  # type: ignore[no-untyped-call]


def _pinned(self: Tensor, device: Any = None) -> Tensor:
    if not self.is_cpu:
        raise RuntimeError(f"cannot pin {self.type()!r}: only tensors of the host can be pinned")
    if memory.is_pinned(self):
        return self
    if self.layout is not torch.strided or self.is_nested:
        return memory.pin(self.clone())
    # With the same strides, as in torch, which therefore can't pin expanded tensors.
    pinned = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype)
    return memory.pin(pinned.copy_(self))


def _pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = factory(*args, **kwargs)
        return memory.pin(tensor) if pin_memory else tensor

    return make


def _read(tolist: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Tensor) -> Any:
        return tolist(self.cpu() if self.device.type == private.NAME else self)

    return read


def _refusing(numpy: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Tensor, **options: Any) -> Any:
        if self.device.type == private.NAME:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return numpy(self, **options)

    return read


def _shown(show: Callable[..., str]) -> Callable[..., str]:
    def read(self: Tensor, **options: Any) -> str:
        if self.device.type != private.NAME:
            return show(self, **options)
        shown = show(self.detach().cpu(), **options).removesuffix(")")
        return f"{shown}, device='{self.device}')"

    return read
