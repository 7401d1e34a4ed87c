"""Parts of a small checkpoint, a store in an empty folder, and what exact equality means."""

from __future__ import annotations

import os
import re
import struct
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from eventloop.checkpoint.store import Store
from eventloop.training.tensor_slices import TensorSlice
from eventloop_testing.ranks import crew_of_threads


@pytest.fixture
def parts() -> dict[str, Any]:
    """Weights in a flat dict, a nest of everything, and one without tensors; the same each time."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "1.weight": torch.randn(64, 8, generator=generator),
        "1.num_batches": torch.tensor(7),
        "0.bias": torch.randn(3, generator=generator).bfloat16(),
    }
    return {
        "model": weights,
        "optimizers": {"adam": {0: {"step": torch.tensor(3.0)}, 1: (0.9, float("nan"), None)}},
        "clock": {"batch": 3, "generator": [2**64, -0.0, b"\0\xff", "ü\n"]},
    }


@pytest.fixture
def names() -> Callable[[Store], list[str]]:
    """Returns what is in a store's folder, sorted."""
    return lambda store: sorted(one.name for one in store.folder.iterdir())


@pytest.fixture
def damage() -> Callable[[Path], None]:
    """Changes one byte of a checkpoint's weights."""

    def damage(path: Path) -> None:
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xaa")

    return damage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store whose folder isn't there yet."""
    return Store(tmp_path / "run" / "checkpoints")


@pytest.fixture
def three(store: Store, parts: dict[str, Any]) -> Store:
    """A store with the checkpoints of batches 1, 2 and 3."""
    for batch in (1, 2, 3):
        store.save(batch, parts, {"batch": batch})
    return store


@pytest.fixture
def slices() -> type[Slices]:
    """What ranks save in slices, and how."""
    return Slices


class Slices:
    """Saves checkpoints as many ranks do, each the slices that it holds."""

    facts: ClassVar = {"moment": {"batch": 3}}
    whole: ClassVar = {
        "model": {
            "wide": torch.arange(35.0).view(7, 5),
            "buffer": torch.tensor([1, 2, 3]),
            "short": torch.arange(2.0).bfloat16(),
        },
        "optimizers": {
            "adam": {
                "state": {0: {"step": torch.tensor(4.0), "mean": -torch.arange(35.0).view(7, 5)}}
            }
        },
    }

    @classmethod
    def cut(cls, nest: Any, rank: int, world_size: int, dim: int = 0) -> Any:
        """Returns what a rank holds: even shares of what has two dimensions, along one of them."""
        if isinstance(nest, dict):
            return {key: cls.cut(one, rank, world_size, dim) for key, one in nest.items()}
        if nest.ndim < 2 and nest.dtype != torch.bfloat16:
            return nest
        along = min(dim, nest.ndim - 1)
        size = -(-nest.shape[along] // world_size)
        start = min(rank * size, nest.shape[along])
        part = nest.narrow(along, start, min(size, nest.shape[along] - start))
        offsets = [0] * nest.ndim
        offsets[along] = start
        return TensorSlice(part, tuple(nest.shape), tuple(offsets))

    @classmethod
    def parts_of(
        cls, rank: int, world_size: int, dim: int = 0, whole: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns what a rank saves."""
        whole = whole or cls.whole
        parts = {name: cls.cut(part, rank, world_size, dim) for name, part in whole.items()}
        own = {f"rank{rank}": {"generator": [rank, 7]}}
        return parts | own | ({"training": {"batches": 3}} if rank == 0 else {})

    @classmethod
    def save(
        cls,
        store: Store,
        world_size: int = 4,
        batch: int = 3,
        parts_of: Callable[[int], dict[str, Any]] | None = None,
        **given: Any,
    ) -> Path:
        """Saves on threads, one a rank; returns rank 0's path, or raises what it raised.

        Args:
            parts_of: returns what a rank saves; `given` is for that of this class.
        """
        crew = crew_of_threads(world_size)

        def save_one(rank: int) -> Path:
            parts = parts_of(rank) if parts_of else cls.parts_of(rank, world_size, **given)
            return store.save(batch, parts, cls.facts, crew[rank])

        with ThreadPoolExecutor(world_size) as pool:
            futures = [pool.submit(save_one, rank) for rank in range(world_size)]
        return next(one.result() for one in futures)


@pytest.fixture(scope="session")
def memory_kb() -> Callable[[Callable[[], object]], int]:
    """Calls a function in a process of its own; returns by how many kB that was larger meanwhile."""
    return _memory_kb


def _memory_kb(function: Callable[[], object]) -> int:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
            before = _peak_kb()
            assert not function()
            os.write(writing, str(_peak_kb() - before).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return int(text)


def _peak_kb() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1])


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Says whether two nests are the same to the bit: types, order of keys, dtypes, zeros."""
    return _same


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        as_bytes = [_dense(tensor).view(torch.uint8) for tensor in (one, other)]
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(*as_bytes)
    if isinstance(one, float):
        # Python itself knows one NaN only.
        return (one != one and other != other) or struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same(list(one), list(other)) and all(map(_same, one.values(), other.values()))
    return one == other


def _dense(tensor: Tensor) -> Tensor:
    """Returns the entries in a row; torch calls a single one dense, whatever its stride."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
