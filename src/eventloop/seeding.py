"""One seed for every random number generator that training uses."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
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


class KeptGenerators:
    """Where the global random generators of Python, NumPy and torch stand, and others.

    Args:
        others: more of torch's generators.
    """

    def __init__(self, others: Iterable[torch.Generator] = ()) -> None:
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy else None
        self._torch = torch.get_rng_state()
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.get_rng_state() if on_gpu else None
        self._others = [(one, one.get_state()) for one in others]

    def put_back(self) -> None:
        """Sets them to where they stood."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
        for generator, state in self._others:
            generator.set_state(state)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leaves the global random generators of Python, NumPy and torch as it found them."""
    kept = KeptGenerators()
    try:
        yield
    finally:
        kept.put_back()
