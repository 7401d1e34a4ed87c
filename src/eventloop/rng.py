"""Random generators of Python, NumPy and torch: seeding, saving and restoring their states."""

from __future__ import annotations

import array
import ctypes
import hashlib
import importlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from eventloop.devices import opened_accelerator


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
    generators: dict[str, Any] = {"python": random, "torch": torch.default_generator}
    if numpy := sys.modules.get("numpy"):
        generators["numpy"] = numpy.random
    return generators


def global_rng_states() -> dict[str, Any]:
    """Returns the states of the host's global generators by name."""
    return {name: get_rng_state(generator) for name, generator in global_generators().items()}


def set_global_rng_states(states: Mapping[str, Any]) -> None:
    """Sets the host's global generators to states from `global_rng_states`; others don't change."""
    if "numpy" in states:
        importlib.import_module("numpy")
    for name, generator in global_generators().items():
        if name in states:
            set_rng_state(generator, states[name])


def objects_of_global_generators() -> list[Any]:
    """Returns the objects behind the host's global generators, whose states a run saves separately."""
    objects: list[Any] = [random.random.__self__, torch.default_generator]  # type: ignore[attr-defined]
    if numpy := sys.modules.get("numpy"):
        legacy = numpy.random.get_state.__self__
        objects += [legacy, legacy._bit_generator]
    return objects


def get_rng_state(generator: Any) -> Any:
    """Returns the state of a generator as a nest of plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random) or generator is random:
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    if callable(getattr(generator, "get_state", None)):
        return arrays_to_tensors(generator.get_state(legacy=False))
    return arrays_to_tensors(generator.bit_generator.state)


def set_rng_state(generator: Any, state: Any) -> None:
    """Sets a generator to a state from `get_rng_state`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError: the state doesn't belong to
            a generator of this kind.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random) or generator is random:
        words = tuple(state["words"].tolist())
        generator.setstate((state["version"], words, state["gauss"]))
    elif callable(getattr(generator, "set_state", None)):
        generator.set_state(checked_numpy_state(tensors_to_arrays(state)))
    else:
        generator.bit_generator.state = checked_numpy_state(tensors_to_arrays(state))


def checked_numpy_state(state: Any) -> Any:
    """Returns a state for NumPy, after checking its position.

    NumPy (2.4) doesn't check it, and would read beyond the generator's words.
    """
    inner = state["state"] if isinstance(state["state"], Mapping) else {}
    for position, max_position in ((inner.get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
        if type(position) is not int or not 0 <= position <= max_position:
            raise ValueError(f"{position!r} is not a position of a {state['bit_generator']}")
    return state


def reseed(generator: Any, seed: int) -> None:
    """Seeds a generator with a seed in [0, 2**64)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif callable(getattr(generator, "set_state", None)):
        generator.seed(seed & 0xFFFFFFFF)  # NumPy's RandomState
    else:
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state


def arrays_to_tensors(value: Any) -> Any:
    """Returns a nest with NumPy arrays replaced by tensors and the names of their dtypes."""
    if isinstance(value, Mapping):
        return {key: arrays_to_tensors(entry) for key, entry in value.items()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        raw = bytearray(value.tobytes())
        kind = torch.uint8
        words = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        return {"array": str(value.dtype), "shape": list(value.shape), "bytes": words}
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def tensors_to_arrays(value: Any) -> Any:
    """Inverse of `arrays_to_tensors`."""
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"array", "shape", "bytes"}:
        numpy = importlib.import_module("numpy")
        words = numpy.frombuffer(value["bytes"].numpy().tobytes(), value["array"])
        return words.reshape(value["shape"]).copy()
    return {key: tensors_to_arrays(entry) for key, entry in value.items()}


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy if it is imported, and torch on every device.

    Args:
        seed: in [0, 2**32), the range that NumPy accepts.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def seed_of(text: str, num_bytes: int = 4) -> int:
    """Returns a seed that depends on a text, below 256 to the power of `num_bytes`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes], "big")


def seed_rank(seed: int, rank: int) -> None:
    """Seeds the global generators of a rank, so that ranks draw different numbers.

    Rank 0 isn't seeded again, so it draws the same numbers as a single process.
    """
    if rank:
        seed_everything(seed_of(f"{seed}/{rank}"))


class HostGenerator(NamedTuple):
    """A global generator of the host, with a cheap check whether it has been used.

    A Mersenne Twister stores its position among its words, and recomputes all words after it has used
    the last. Therefore, its fingerprint is the position, some of the words, and the cached normal
    number, if any.
    """

    fingerprint: Callable[[], Any]  # returns a different value for each state of the generator
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]  # takes 64 bits


_NUM_BYTES = 32  # the bytes to read of a Mersenne Twister's 2,500, including its position


def host_generators() -> dict[str, HostGenerator]:
    """Returns the host's global generators by name; NumPy's if it is imported."""
    if "numpy" not in _HOST and (numpy := sys.modules.get("numpy")):
        module = numpy.random
        _HOST["numpy"] = HostGenerator(
            _fingerprint_of_numpy(module),
            lambda: module.get_state(legacy=False),
            module.set_state,
            lambda number: module.seed(number & 0xFFFFFFFF),
        )
    return _HOST


def _memory(address: int, num_bytes: int) -> Any:
    """Returns an object whose attribute `raw` reads the current bytes at an address."""
    return (ctypes.c_char * num_bytes).from_address(address)


def _fingerprint_of_python() -> Callable[[], Any]:
    """Returns a function that reads the memory of Python's generator, or else `random.getstate`.

    `getstate` takes 100 times as long. Memory is read only if it has CPython's layout.
    """
    generator: Any = random.random.__self__  # type: ignore[attr-defined]
    *words, position = random.getstate()[1]
    expected = array.array("I", [position, *words]).tobytes()
    state_offset, state_end = object.__basicsize__, random.Random.__base__.__basicsize__  # type: ignore[union-attr]
    if not ctypes.string_at(id(generator) + state_offset, state_end - state_offset).startswith(
        expected
    ):
        return random.getstate
    memory = _memory(id(generator) + state_offset, _NUM_BYTES)
    return lambda: (memory.raw, generator.gauss_next)


def _fingerprint_of_numpy(module: Any) -> Callable[[], Any]:
    """Returns a function that reads the memory of NumPy's generator, or else its state.

    Getting the state of a Mersenne Twister takes 20 times as long. The offset of the cached normal
    number and its flag is found in another generator, whose number is known.
    """
    generator = module.get_state.__self__
    number = 0.123456789
    probe = type(generator)(0)
    probe.set_state({**probe.get_state(legacy=False), "has_gauss": 1, "gauss": number})
    memory = ctypes.string_at(id(probe), type(probe).__basicsize__)
    gauss_offset = memory.find(struct.pack("=qd", 1, number))
    gauss_memory = _memory(id(generator) + max(0, gauss_offset), 16)
    bits: Any = None
    words_memory: Any = None

    def fingerprint() -> Any:
        nonlocal bits, words_memory
        if (current_bits := module.get_bit_generator()) is not bits:
            bits = current_bits
            words_memory = None
            if type(bits).__name__ == "MT19937" and gauss_offset >= 0:
                words_memory = _memory(bits.ctypes.state_address + 625 * 4 - _NUM_BYTES, _NUM_BYTES)
        return (
            repr(module.get_state(legacy=False))
            if words_memory is None
            else (words_memory.raw, gauss_memory.raw)
        )

    return fingerprint


def _fingerprint_of_torch() -> Callable[[], Any]:
    """Returns a function that reads the memory of torch's generator, or else its state.

    `get_state` takes 20 times as long. Memory is read only if it has the layout of torch 2.13: seed,
    number of words left, a flag, position, words, and the cached normal numbers. A test with another
    generator verifies the layout. `_cdata` is the address, which has no public name.
    """

    def full_state(generator: torch.Generator) -> bytes:
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def reader(start: int) -> Callable[[], Any]:
        head = _memory(start, _NUM_BYTES)
        normal_memory = _memory(
            start + 24 + 624 * 4, 17
        )  # a float and a double, each before its flag

        def fingerprint() -> tuple[Any, ...]:
            words = head.raw
            normal = normal_memory.raw  # a flag is the first of four bytes
            return words[:12], words[16:], normal[4] and normal[:4], normal[16] and normal[8:]

        return fingerprint

    probe: Any = torch.Generator().manual_seed(0x0123456789ABCDEF)
    state_offset = max(0, ctypes.string_at(probe._cdata, 256).find(full_state(probe)[:12]))
    fingerprint = reader(probe._cdata + state_offset)
    integers = torch.empty(624, dtype=torch.int32, device="cpu")
    normal = torch.empty((), dtype=torch.float64, device="cpu")
    fingerprints = [fingerprint()]
    for draw in (integers.random_, normal.normal_, normal.normal_):
        draw(generator=probe)
        fingerprints.append(fingerprint())
    words = [seen_fingerprint[:2] for seen_fingerprint in fingerprints]
    if state_offset and len({*fingerprints}) == 4 and len({*words}) == 3 and words[2] == words[3]:
        return reader(_TORCHS._cdata + state_offset)
    return lambda: full_state(_TORCHS)


_TORCHS: Any = torch.default_generator
_HOST = {
    "python": HostGenerator(
        _fingerprint_of_python(), random.getstate, random.setstate, random.seed
    ),
    "torch": HostGenerator(
        _fingerprint_of_torch(), _TORCHS.get_state, _TORCHS.set_state, _TORCHS.manual_seed
    ),
}


class KeptGenerators:
    """Saved states of the global generators of Python, NumPy and torch, and of other generators.

    Args:
        others: additional generators.

    Attributes:
        gpu: the state of the accelerator's generator, whose changes can't be detected.
    """

    _latest: ClassVar[tuple[dict[str, Any], dict[str, Any]]] = {}, {}

    def __init__(self, others: Iterable[Any] = ()) -> None:
        fingerprints = _fingerprints()
        # States of generators that haven't moved are reused: getting them takes longer than a
        # fingerprint.
        last_fingerprints, states = KeptGenerators._latest
        if fingerprints != last_fingerprints:
            states = {
                name: states[name]
                if last_fingerprints.get(name) == fingerprint
                else _HOST[name].get_state()
                for name, fingerprint in fingerprints.items()
            }
            KeptGenerators._latest = fingerprints, states
        self._fingerprints = fingerprints
        self._states = states
        self._accelerator = opened_accelerator()
        self.gpu = None if self._accelerator is None else self._accelerator.get_rng_state()
        self._others = [(fingerprint, get_rng_state(fingerprint)) for fingerprint in others]

    def moved(self) -> set[str]:
        """Returns the names of the host's generators whose state has changed."""
        if (fingerprints := _fingerprints()) == self._fingerprints:
            return set()
        return {
            name
            for name, fingerprint in fingerprints.items()
            if self._fingerprints.get(name) != fingerprint
        }

    def put_back(self) -> None:
        """Restores the saved states."""
        for name in self.moved() & self._states.keys():
            _HOST[name].set_state(self._states[name])
        if self._accelerator is not None and self.gpu is not None:
            self._accelerator.set_rng_state(self.gpu)
        for generator, state in self._others:
            set_rng_state(generator, state)


def _fingerprints() -> dict[str, Any]:
    return {name: generator[0]() for name, generator in host_generators().items()}


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global RNG states of Python, NumPy and torch after a block."""
    saved = KeptGenerators()
    try:
        yield
    finally:
        saved.put_back()
