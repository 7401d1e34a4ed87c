"""All that the pretend device uses of torch without a public name; checked with torch 2.13.

torch has no public way to write a device in Python. The private way, which its own tests use, registers
the key of out-of-tree devices (PrivateUse1) with hooks and a guard that support a single device and no
streams. It can be called once per process and can't be undone: everything that is switched on and off
with the device is in `patches.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration

from eventloop_testing.pretend.errors import PretendError

NAME = "pretend"
KEY = "PrivateUse1"
AUTOGRAD_KEY = "AutogradPrivateUse1"
AUTOCAST_KEY = "AutocastPrivateUse1"
DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
# The function in torch.autograd that its public functions call.
RUN_BACKWARD = "_engine_run_backward"
# Prefix of the functions that torch.accelerator calls.
ACCELERATOR = "_accelerator_"

index = 0  # of the device that this process uses
_libraries: list[Any] = []  # an operator is registered as long as its library lives


def register(module: Any, is_on: Callable[[], bool]) -> None:
    """Registers the device; `module` becomes `torch.pretend`.

    Args:
        module: its functions.
        is_on: whether `torch.accelerator` shall see it now.
    """
    core: Any = torch._C
    find = core._accelerator_getAccelerator
    core._accelerator_getAccelerator = lambda: find() if is_on() else None
    # At its first use, autograd's engine starts a thread for each device, after which the process can't
    # be forked. Used before the device is registered, it starts none.
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    # Ranks exchange tensors of the device through gloo, whose operators see the wrapped host tensors.
    torch.distributed.Backend.default_device_backend_map[NAME] = "gloo"
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)


def backward_on_this_thread() -> AbstractContextManager[Any]:
    """Makes backward run on the calling thread, instead of a thread per device."""
    return torch.autograd.set_multithreading_enabled(False)


def is_in_backward() -> bool:
    """Whether a backward pass is under way on this thread."""
    return torch._C._current_graph_task_id() != -1


def implement(name: str, function: Callable[..., Any], key: str = KEY) -> None:
    """Registers an operator of ATen under a dispatch key."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, function, key)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def implement_the_rest(function: Any, key: str = KEY) -> None:
    """Registers the fallback for all operators without an implementation under a dispatch key."""
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(function, key)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def selected() -> torch.device:
    """Returns the device that this process uses."""
    return torch.device(NAME, index)


def num_devices() -> int:
    """Returns the number of devices: one for each rank on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def select(device: Any) -> None:
    """Selects the device of this process; torch's guard for Python devices supports one per process.

    Raises:
        PretendError: there is no device of this number.
    """
    global index
    number = device if isinstance(device, int) else torch.device(device).index
    if number is None or number == index:
        return
    if number not in range(num_devices()):
        raise PretendError(
            f"there is no device {NAME}:{number}: torch's interface for devices in Python allows one "
            f"a process (torch 2.13), and ranks on this machine are {num_devices()}"
        )
    index = number


def wrapper(cls: type[Tensor], raw: Tensor) -> Any:
    """Makes a tensor of the device with size, strides and type of one of the host, without memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        raw.size(),
        strides=raw.stride(),
        storage_offset=raw.storage_offset(),
        dtype=raw.dtype,
        layout=raw.layout,
        device=selected(),
    )


def without_autocast() -> AbstractContextManager[Any]:
    """Disables the rules of autocast."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST_KEY))
    return torch._C._ExcludeDispatchKeyGuard(keys)


def key_of(storage: Any) -> int:
    """Returns an identifier of a storage, unique while it lives or is weakly referenced."""
    return int(storage._cdata)


def key_of_generator(generator: Any) -> int:
    """Returns an identifier of a generator, unique while it lives."""
    return int(generator._cdata)


def weakly(storage: Any) -> StorageWeakRef:
    """Returns a weak reference to a storage."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def schema_of(operator: Any) -> Any:
    """Returns the declaration of an operator: its arguments, and which of them it writes."""
    return operator._schema
