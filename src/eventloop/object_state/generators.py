"""The states of random generators of Python, NumPy and torch, and of NumPy's seed sequences."""

from __future__ import annotations

import importlib
import operator
import random
from collections.abc import Mapping
from typing import Any

import torch

from eventloop.devices import kind_of
from eventloop.object_state.not_savable import NotSavableError
from eventloop.rng import (
    arrays_to_tensors,
    checked_numpy_state,
    get_rng_state,
    set_rng_state,
    tensors_to_arrays,
)

# The classes of which a resumed run can create instances.
PLAIN_GENERATORS = ("Random", "Generator", "RandomState")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MAX_SPAWNED = 10**4  # seeds that a resumed run spawns again


def encode_generator(generator: Any) -> dict[str, Any]:
    """Returns the state of a random generator of Python, NumPy or torch."""
    if isinstance(generator, random.SystemRandom):
        raise NotSavableError("random numbers of the operating system can't be reproduced")
    library, bits = _kind_of_generator(generator)
    is_on_host = library != "torch" or kind_of(generator.device).is_host
    state = get_rng_state(generator)
    facts = {"library": library, "bits": bits, "is_on_host": is_on_host}
    return {"kind": "generator", **facts, "state": state}


def fill_generator(generator: Any, nest: Mapping[str, Any]) -> None:
    """Sets a generator to a saved state."""
    library, bits = _kind_of_generator(generator)
    if (library, bits) != (nest["library"], nest["bits"]):
        raise NotSavableError(f"it is a generator of {library} {bits} here".rstrip())
    set_rng_state(generator, nest["state"])


def new_generator(nest: Mapping[str, Any], device: torch.device) -> Any:
    """Returns a new generator with a saved state.

    Args:
        device: the device for a torch generator that wasn't on the host.
    """
    library = nest["library"]
    bits = nest["bits"]
    generator: Any
    if library == "torch":
        is_on_host = nest.get("is_on_host", True)  # missing in checkpoints of version 0.1
        generator = torch.Generator("cpu" if is_on_host else device)
    elif library == "python":
        generator = random.Random()
    elif library == "numpy legacy":
        generator = importlib.import_module("numpy").random.RandomState()
    elif library == "numpy" and bits in _BIT_GENERATORS:
        numpy_random = importlib.import_module("numpy").random
        generator = numpy_random.Generator(getattr(numpy_random, bits)())
    else:
        raise NotSavableError(f"a generator of {library!r} with {bits!r} can't be created")
    set_rng_state(generator, nest["state"])
    return generator


def encode_seed_source(source: Any) -> dict[str, Any]:
    """Returns the state of a NumPy bit generator, or the number of seeds that a sequence has spawned."""
    if hasattr(source, "n_children_spawned"):
        return {"kind": "seeds", "num_spawned": source.n_children_spawned}
    state = arrays_to_tensors(source.state)
    return {"kind": "bits", "bits": type(source).__name__, "state": state}


def fill_seed_source(source: Any, nest: Mapping[str, Any]) -> None:
    """Sets a bit generator or a seed sequence to a saved state."""
    if nest["kind"] == "bits":
        if type(source).__name__ != nest["bits"]:
            raise NotSavableError(f"it is a {type(source).__name__} here")
        source.state = checked_numpy_state(tensors_to_arrays(nest["state"]))
        return
    # NumPy can't set the count, so spawn seeds until it matches.
    num_missing = operator.index(nest["num_spawned"]) - source.n_children_spawned
    if not 0 <= num_missing <= _MAX_SPAWNED:
        raise NotSavableError(f"{num_missing} more seeds can't be spawned")
    source.spawn(num_missing)


def _kind_of_generator(generator: Any) -> tuple[str, str]:
    """Returns the library of a generator, and the name of its NumPy bit generator or ""."""
    if isinstance(generator, torch.Generator):
        return "torch", ""
    if isinstance(generator, random.Random):
        return "python", ""
    if hasattr(generator, "bit_generator"):
        return "numpy", type(generator.bit_generator).__name__
    return "numpy legacy", ""
