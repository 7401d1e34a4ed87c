"""Random generators of Python, NumPy and torch: where they stand, seeding, and leaving them alone."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def is_generator(value: object) -> bool:
    """Returns whether a value is a random generator: Python's, NumPy's or torch's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def global_generators() -> dict[str, Any]:
    """Returns the host's global generators, by name.

    NumPy's is there where it is imported. `get_rng_state` and `put` take them as they take others.
    """
    shared: dict[str, Any] = {"python": random, "torch": torch.default_generator}
    if numpy := sys.modules.get("numpy"):
        shared["numpy"] = numpy.random
    return shared


def get_rng_state(generator: Any) -> Any:
    """Returns where a generator stands, as a nest of plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random) or generator is random:
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    if callable(getattr(generator, "get_state", None)):
        return plain(generator.get_state(legacy=False))
    return plain(generator.bit_generator.state)


def set_rng_state(generator: Any, standing: Any) -> None:
    """Has a generator go on from where `get_rng_state` found it.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError: no generator of its kind
            stands there.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(standing)
    elif isinstance(generator, random.Random) or generator is random:
        words = tuple(standing["words"].tolist())
        generator.setstate((standing["version"], words, standing["gauss"]))
    elif callable(getattr(generator, "set_state", None)):
        generator.set_state(_within_memory(unplain(standing)))
    else:
        generator.bit_generator.state = _within_memory(unplain(standing))


def _within_memory(state: Any) -> Any:
    """Returns a state of NumPy's, which reads beyond its words where a position says so (2.4)."""
    inner = state["state"] if isinstance(state["state"], Mapping) else {}
    for position, most in ((inner.get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
        if type(position) is not int or not 0 <= position <= most:
            raise ValueError(f"{position!r} is not a position of a {state['bit_generator']}")
    return state


def reseed(generator: Any, seed: int) -> None:
    """Lets a generator begin anew from a seed, in [0, 2**64)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif callable(getattr(generator, "set_state", None)):
        generator.seed(seed & 0xFFFFFFFF)  # NumPy's RandomState
    else:
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state


def plain(value: Any) -> Any:
    """Returns a nest in which NumPy's arrays are tensors with the name of their type."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        raw, kind = bytearray(value.tobytes()), torch.uint8
        words = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        return {"array": str(value.dtype), "shape": list(value.shape), "bytes": words}
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def unplain(value: Any) -> Any:
    """Returns the nest that `plain` was given."""
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"array", "shape", "bytes"}:
        numpy = importlib.import_module("numpy")
        words = numpy.frombuffer(value["bytes"].numpy().tobytes(), value["array"])
        return words.reshape(value["shape"]).copy()
    return {key: unplain(one) for key, one in value.items()}


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
