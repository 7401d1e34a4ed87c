"""A nest that no run writes is refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from eventloop.object_state.decoding import Decoder
from eventloop.object_state.not_savable import NotSavableError

HOSTILE = {
    "unknown kind": {"kind": "module", "name": "os", "number": 0},
    "object dtype": {"kind": "numpy array", "number": 0,
                     "values": {"array": "O", "shape": [1], "bytes": torch.zeros(8, dtype=torch.uint8)}},
    "structured dtype": {"kind": "numpy array", "number": 0,
                         "values": {"array": "i4,O", "shape": [1], "bytes": torch.zeros(12, dtype=torch.uint8)}},
    "bit generator": {"kind": "generator", "library": "numpy", "bits": "system", "state": {}, "number": 0},
    "array of characters": {"kind": "array", "typecode": "u", "bytes": b"abcd", "number": 0},
    "iterator over a dict": {"kind": "iterator", "number": 1, "position": 0,
                             "over": {"kind": "dict", "keys": [], "items": [], "number": 0}},
    "huge range in a position": {"kind": "iterator", "number": 0, "position": 2.5, "over": "abc"},
    "reference": {"kind": "same", "number": 7},
    "unknown object": {"kind": "object", "path": "os.system"},
    "no kind": {"number": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_nest_that_no_run_writes_is_refused(name):
    """Nothing is looked up by a name from a file, imported or called."""
    with pytest.raises((NotSavableError, LookupError, TypeError, ValueError)):
        Decoder({}, torch.device("cpu")).decode(HOSTILE[name])


@pytest.mark.parametrize("size", [0, 7, 9, 2**20])
def test_numbers_of_c_take_bytes_of_their_own_size_alone(size):
    """A file can't write beyond their memory."""
    number = ctypes.c_double(1.5)
    nest = {"kind": "ctypes", "bytes": b"\1" * size}

    with pytest.raises(ValueError, match="structure"):
        Decoder({}, torch.device("cpu")).decode_contents(nest, number)

    assert number.value == 1.5


@pytest.mark.parametrize("target", [ctypes.c_char_p(b"a"), ctypes.pointer(ctypes.c_int(1)), [1]])
def test_pointers_take_no_bytes(target):
    """They would point wherever a file says."""
    nest = {"kind": "ctypes", "bytes": b"\1" * 8}

    with pytest.raises(NotSavableError):
        Decoder({}, torch.device("cpu")).decode_contents(nest, target)
