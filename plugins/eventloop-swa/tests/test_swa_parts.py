"""The parts alone, without a training."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from eventloop_swa import batch_norms, estimating, in_place


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def batches(num=5):
    generator = torch.Generator().manual_seed(3)
    return [1 + 2 * torch.randn(8, 1, 4, 4, generator=generator) for _ in range(num)]


@torch.no_grad()
def test_statistics_are_those_of_torch():
    """`update_bn` is the reference."""
    model, reference = network(), network()
    model(batches()[0])  # what was seen before counts for nothing

    with estimating(model):
        for batch in batches():
            model(batch)
    update_bn(batches(), reference)

    for name, expected in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected)
    assert model[1].momentum == reference[1].momentum == 0.1


@torch.no_grad()
def test_statistics_of_other_batches_differ():
    """Control: the comparison sees one batch less."""
    model, reference = network(), network()

    with estimating(model):
        for batch in batches(4):
            model(batch)
    update_bn(batches(5), reference)

    assert not torch.allclose(model[1].running_mean, reference[1].running_mean)


def test_only_norms_that_learn_are_estimated():
    """One that was frozen keeps what it has; without statistics there is nothing to keep."""
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False),
        nn.LayerNorm(2),
    )  # fmt: skip
    model[1].eval()
    model[1].running_mean.fill_(7)

    with torch.no_grad(), estimating(model):
        model(torch.randn(4, 2))

    assert list(batch_norms(model)) == ["0"]
    assert torch.equal(model[1].running_mean, torch.full((2,), 7.0))


def test_other_weights_take_the_place_and_give_it_back():
    """Bit by bit, whatever happens meanwhile."""
    model, other = network(0), network(1)
    before = {name: one.clone() for name, one in model.state_dict().items()}

    with pytest.raises(ArithmeticError), in_place(model, other):
        inside = {name: one.clone() for name, one in model.state_dict().items()}
        model(batches()[0])
        raise ArithmeticError

    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in inside.items())
    assert not torch.equal(inside["3.weight"], before["3.weight"])
