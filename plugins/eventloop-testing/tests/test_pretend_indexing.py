"""A tensor of the pretend accelerator is indexed by tensors of the host where a GPU lets it, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from eventloop_testing import MixedDevicesError, counted_waits

POSITIONS = torch.tensor([2, 0])
MASK = torch.tensor([True, False, True])


def put(*args, **given):
    return lambda x: x.index_put_(*args, **given)


# How often the host waits: positions are copied from memory that isn't pinned, masks aren't (torch 2.13).
TAKEN = {
    "positions": (lambda x: x[POSITIONS], 1),
    "positions of 32 bits": (lambda x: x[POSITIONS.int()], 1),
    "one position": (lambda x: x[torch.tensor(1)], 0),  # torch reads it from the host's memory
    "two dimensions": (lambda x: x[POSITIONS, POSITIONS], 1),
    "after a slice": (lambda x: x[:, POSITIONS], 1),
    "beside one of the device": (lambda x: x[POSITIONS, POSITIONS.to(x.device)], 2),  # `to`
    "mask": (lambda x: x[MASK], 0),
    "mask beside positions": (lambda x: x[MASK, POSITIONS], 1),
    "put": (lambda x: put((POSITIONS,), torch.ones(2, 3, device=x.device))(x), 1),
    "put by mask": (lambda x: put((MASK,), torch.ones(2, 3, device=x.device))(x), 0),
    "added": (lambda x: put((POSITIONS,), torch.ones(3, device=x.device), accumulate=True)(x), 1),
    "added by mask": (
        lambda x: put((MASK,), torch.ones(3, device=x.device), accumulate=True)(x),
        1,
    ),
    "number": (put((POSITIONS,), torch.tensor(7.0)), 1),
    "number by mask": (put((MASK,), torch.tensor(7.0)), 1),
    "fill": (lambda x: put((MASK.to(x.device),), torch.tensor(7.0))(x), 1),  # `to`
    "fill by a shape of 1": (lambda x: put((MASK.to(x.device),), torch.ones(1))(x), 1),  # `to`
    "set": (lambda x: x.__setitem__(POSITIONS, 7.0), 1),
}
REFUSED = {
    "tensor of the host": lambda x: x.cpu()[POSITIONS.to(x.device)],
    "values of the host": put((POSITIONS,), torch.ones(2, 3)),
    "values by a mask of the host": put((MASK,), torch.ones(1)),
    "values added": lambda x: put((MASK.to(x.device),), torch.ones(1), accumulate=True)(x),
    "index_select": lambda x: x.index_select(0, POSITIONS),
    "index_copy": lambda x: x.index_copy(0, POSITIONS, x[:2]),
    "index_add": lambda x: x.index_add(0, POSITIONS, x[:2]),
    "index_fill": lambda x: x.index_fill(0, POSITIONS, 1.0),
    "gather": lambda x: x.gather(0, POSITIONS[None]),
    "scatter": lambda x: x.scatter(0, POSITIONS[None], 1.0),
    "take": lambda x: x.take(POSITIONS),
    "masked_fill": lambda x: x.masked_fill(MASK, 1.0),
    "masked_select": lambda x: x.masked_select(MASK),
    "embedding": lambda x: torch.nn.functional.embedding(POSITIONS, x),
}


def numbers(device):
    return torch.arange(9.0, device=device).reshape(3, 3)


@pytest.mark.parametrize(("index", "num_waits"), TAKEN.values(), ids=TAKEN)
def test_a_tensor_of_the_host_indexes_as_on_a_gpu(index, num_waits, pretend_device):
    """The values are the host's; a copy that blocks is a wait."""
    of_host, x = numbers("cpu"), numbers(pretend_device)
    expected = index(of_host)

    with counted_waits() as waits:
        result = index(x)

    assert [one.how for one in waits] == ["copy to the device"] * num_waits
    assert x.tolist() == of_host.tolist()
    if result is not None:
        assert result.device == x.device
        assert result.tolist() == expected.tolist()


@pytest.mark.parametrize("index", REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_refuses_stays_an_error(index, pretend_device):
    """The same operators beside it, and values that aren't one number."""
    with pytest.raises(MixedDevicesError):
        index(numbers(pretend_device))


def test_gradients_go_through_a_position_of_the_host(pretend_device):
    """The backward pass adds by the same positions."""
    x = numbers(pretend_device).requires_grad_()

    (x[POSITIONS] * 2 + x[MASK]).sum().backward()

    assert x.grad.tolist() == [[3.0] * 3, [0.0] * 3, [3.0] * 3]


def test_a_mask_of_the_device_beside_positions_waits(pretend_device):
    """It is no fill, so the host has to know how many are picked."""
    x, mask = numbers(pretend_device), MASK.to(pretend_device)
    positions = POSITIONS.to(pretend_device)

    with counted_waits() as waits:
        x[mask, positions] = 7.0

    assert [one.how for one in waits] == ["index_put_"]
    assert x.tolist() == [[0, 1, 7], [3, 4, 5], [7, 7, 8]]


def test_a_mask_waits_in_the_backward_pass_too(pretend_device):
    """Its positions are looked for once more."""
    x = numbers(pretend_device).requires_grad_()
    picked = x[x > 4].sum()

    with counted_waits() as waits:
        picked.backward()

    assert [one.how for one in waits] == ["index_put"]
    assert x.grad.tolist() == [[0.0] * 3, [0.0, 0.0, 1.0], [1.0] * 3]
