"""Tensors keep their memory format, and share memory as before."""

from __future__ import annotations

import pytest
import torch

from eventloop.object_state.tensor_memory import laid_out


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5), (1, 5), (0, 3)])
def test_a_tensor_keeps_its_memory_format(restored, shape):
    """Sums over it would otherwise be of another order."""
    tensor = torch.randn(shape).transpose(0, -1)

    result = restored(tensor)

    assert result.stride() == tensor.stride() or result.numel() == 0
    assert torch.equal(result, tensor)


@pytest.mark.parametrize("strides", [(0, 0), (1, 1), (100, 1), (1,)])
def test_strides_that_do_not_fill_memory_are_not_taken(strides):
    """They come from a file; an expanded tensor becomes a whole one."""
    values = torch.arange(6.0).reshape(2, 3)

    try:
        result = laid_out(values, strides, torch.device("cpu"))
    except ValueError:
        return
    assert torch.equal(result, values)
    assert result.is_contiguous()
