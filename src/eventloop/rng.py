"""Random generators of Python, NumPy and torch: where they stand, seeding, and leaving them alone."""

from __future__ import annotations

import array
import ctypes
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

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
    """Returns the host's global generators by name, for `get_rng_state` and `set_rng_state`."""
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
        _HOST.pop("numpy", None)  # what it knows of NumPy's generator
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


class HostGenerator(NamedTuple):
    """A global generator of the host, of which it is cheap to see whether it has moved."""

    words: Callable[[], Any]  # returns another value wherever the generator stands elsewhere
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]  # takes 64 bits


def host_generators() -> dict[str, HostGenerator]:
    """Returns the host's global generators by name; NumPy's where it is imported."""
    if "numpy" not in _HOST and (numpy := sys.modules.get("numpy")):
        own = _Numpys(numpy.random)
        _HOST["numpy"] = HostGenerator(own.words, own.get_state, own.set_state, own.seed)
    return _HOST


def _words_of_python() -> Callable[[], Any]:
    """Returns what reads its memory, if that is CPython's: `getstate` takes 15 times as long."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined]
    *words, position = random.getstate()[1]
    expected = array.array("I", [position, *words]).tobytes()
    first, end = object.__basicsize__, random.Random.__base__.__basicsize__  # type: ignore[union-attr]
    memory = (ctypes.c_char * (end - first)).from_address(id(generator) + first)
    if not memory.raw.startswith(expected):
        return random.getstate
    return lambda: (memory.raw, generator.gauss_next)


class _Numpys:
    """NumPy's generator; the memory of a Mersenne Twister is read 40 times as fast as its state.

    The second number of `normal`, which waits for its next call, lies elsewhere. There can be
    another one only where the memory has changed, where there was one, or where a state was set.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.get_state: Callable[[], Any] = lambda: module.get_state(legacy=False)
        self._last: tuple[Any, Any] = (None, None)  # memory and that number, if there is one

    def words(self) -> Any:
        if (memory := self._memory()) is None:
            return repr(self.get_state())
        if memory != self._last[0] or self._last[1] is not None:
            state = self.get_state()
            self._last = memory, state["gauss"] if state["has_gauss"] else None
        return self._last

    def set_state(self, state: Any) -> None:
        self._module.set_state(state)
        self._last = (None, None)

    def seed(self, number: int) -> None:
        self._module.seed(number & 0xFFFFFFFF)
        self._last = (self._memory(), None)

    def _memory(self) -> bytes | None:
        bits = self._module.get_bit_generator()
        if type(bits).__name__ != "MT19937":
            return None
        return ctypes.string_at(bits.ctypes.state_address, 625 * 4)


def _words_of_torch() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


_torchs = torch.default_generator
_HOST = {
    "python": HostGenerator(_words_of_python(), random.getstate, random.setstate, random.seed),
    "torch": HostGenerator(
        _words_of_torch, _torchs.get_state, _torchs.set_state, _torchs.manual_seed
    ),
}


class KeptGenerators:
    """Where the global random generators of Python, NumPy and torch stand, and others.

    Args:
        others: more of torch's generators.
    """

    _last: ClassVar[tuple[dict[str, Any], dict[str, Any]]] = {}, {}

    def __init__(self, others: Iterable[torch.Generator] = ()) -> None:
        words = {name: one.words() for name, one in host_generators().items()}
        last, states = KeptGenerators._last  # they take longer to get than words to compare
        if words != last:
            states = {
                name: states[name] if last.get(name) == now else _HOST[name].get_state()
                for name, now in words.items()
            }
            KeptGenerators._last = words, states
        self._words, self._states = words, states
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.get_rng_state() if on_gpu else None
        self._others = [(one, one.get_state()) for one in others]

    def moved(self) -> set[str]:
        """Returns the names of the host's generators that stand elsewhere now."""
        words = {name: one.words() for name, one in host_generators().items()}
        return {name for name, now in words.items() if self._words.get(name) != now}

    def put_back(self) -> None:
        """Sets them to where they stood."""
        for name in self.moved() & self._states.keys():
            _HOST[name].set_state(self._states[name])
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
