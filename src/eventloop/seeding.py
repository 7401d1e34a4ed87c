"""One seed for every random number generator that training uses."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy where it is imported, and torch on every device.

    Args:
        seed: in [0, 2**32), the range of NumPy.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Has each rank draw other numbers from now on; rank 0 goes on with those of one process."""
    if rank:
        text = f"{seed}/{rank}"
        seed_everything(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leaves the global random generators of Python, NumPy and torch as it found them."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
