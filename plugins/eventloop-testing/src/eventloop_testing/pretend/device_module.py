"""The module `torch.pretend`: the functions that `torch.cuda` and other devices provide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import autocast, generators, lines, memory, private
from eventloop_testing.pretend.generators import get_rng_state, manual_seed, set_rng_state
from eventloop_testing.pretend.streams import Event, Stream, stream_of
from eventloop_testing.pretend.waits import waited

__all__ = ["Event", "Stream", "get_rng_state", "manual_seed", "set_rng_state"]

is_switched_on = False  # by `pretend_device`
_initialized = True  # required by torch.utils.checkpoint to restore random states (torch 2.13)


def is_available() -> bool:
    """Whether the device is switched on."""
    return is_switched_on


def is_initialized() -> bool:
    """Whether the device is switched on."""
    return is_switched_on


def init() -> None:
    """Does nothing: the device needs no start."""


def device_count() -> int:
    """Returns the number of ranks on this machine: torch allows Python devices only one device a process."""
    return private.num_devices() if is_switched_on else 0


def current_device() -> int:
    """Returns the number of the device that this process uses."""
    return private.index


def set_device(device: Any) -> None:
    """Selects the device of this process, which can't change."""
    private.select(device)


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Selects the device of this process, which can't change."""
    previous_index = private.index
    set_device(device)
    try:
        yield
    finally:
        private.index = previous_index


def get_device_name(device: Any = None) -> str:
    """Returns a name to print."""
    return "pretend accelerator of eventloop-testing"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Returns a version, for code that expects the version of a GPU."""
    return (0, 0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Returns False: the host only emulates it. `precision="auto"` is float32, with the host's bits."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Returns the dtypes that autocast supports."""
    return autocast.DTYPES


def _is_in_bad_fork() -> bool:
    return not is_switched_on


def manual_seed_all(seed: int) -> None:
    """Seeds the device's own generator, as `torch.manual_seed` does."""
    manual_seed(seed)


def initial_seed() -> int:
    """Returns the seed of the device's generator."""
    return generators.default().initial_seed()


def get_rng_state_all() -> list[Tensor]:
    """Returns the state of the device's own generator."""
    return [get_rng_state()]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Sets the state of the device's generator."""
    set_rng_state(new_states[0])


def current_stream(device: Any = None) -> Stream:
    """Returns the stream on which this thread queues its work."""
    return stream_of(lines.current())


def default_stream(device: Any = None) -> Stream:
    """Returns the stream that is current by default."""
    return stream_of(lines.DEFAULT)


def set_stream(stream: Stream) -> None:
    """Makes a stream the current stream of this thread."""
    lines.set_current(stream.line)


def stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Makes a stream the current stream of this thread, as a context manager."""
    return lines.on(lines.current() if stream is None else stream.line)


def synchronize(device: Any = None) -> None:
    """Waits on the host until all queued work has finished."""
    waited("synchronize")
    lines.host_waits()


def memory_allocated(device: Any = None) -> int:
    """Returns how many bytes tensors hold now."""
    return memory.COUNTS.allocated


def max_memory_allocated(device: Any = None) -> int:
    """Returns the maximum number of bytes that tensors held."""
    return memory.COUNTS.peak


def memory_reserved(device: Any = None) -> int:
    """Returns the number of allocated bytes: there is no cache to reserve more."""
    return memory.COUNTS.allocated


def max_memory_reserved(device: Any = None) -> int:
    """Returns the maximum number of allocated bytes."""
    return memory.COUNTS.peak


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns the counts, under torch's names for them."""
    counts = memory.COUNTS
    return {
        "allocated_bytes.all.current": counts.allocated,
        "allocated_bytes.all.peak": counts.peak,
        "reserved_bytes.all.current": counts.allocated,
        "reserved_bytes.all.peak": counts.peak,
        "allocation.all.allocated": counts.num_allocations,
        "num_alloc_retries": 0,
        "num_ooms": counts.num_failed,
    }


def reset_peak_memory_stats(device: Any = None) -> None:
    """Resets the peak to the current allocation."""
    memory.COUNTS.peak = memory.COUNTS.allocated


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Resets the counts of allocations to 0."""
    memory.COUNTS.num_allocations = memory.COUNTS.num_failed = 0


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns the number of free bytes and of all bytes."""
    return memory.COUNTS.limit - memory.COUNTS.allocated, memory.COUNTS.limit


def empty_cache() -> None:
    """Prevents later allocations from reusing freed memory: there is no other cache."""
    memory.forget_freed()
