"""Facts about tensors survive a checkpoint; no other object of torch does."""

from __future__ import annotations

import pytest
import torch

from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.torch_values import decode_torch_value

CPU = torch.device("cpu")
VALUES = [
    torch.Size([2, 3]),
    torch.Size([]),
    CPU,
    torch.bfloat16,
    torch.channels_last,
    torch.sparse_csr,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_fact_comes_back(restored, value):
    """As the same constant, or an equal value of the same class."""
    result = restored(value)

    assert type(result) is type(value)
    assert result == value


def test_a_device_that_is_not_the_host_is_that_of_the_run():
    """The run may be resumed on another one."""
    assert (
        decode_torch_value({"kind": "device", "is_host": False}, torch.device("meta")).type
        == "meta"
    )


HOSTILE = [
    ({"kind": "torch constant", "name": "torch.load"}, NotSavableError),
    ({"kind": "torch constant", "name": "os.system"}, NotSavableError),
    ({"kind": "size", "items": ["a"]}, TypeError),
]


@pytest.mark.parametrize(("nest", "error"), HOSTILE)
def test_no_other_name_is_looked_up(nest, error):
    """A file may say anything."""
    with pytest.raises(error):
        decode_torch_value(nest, CPU)
