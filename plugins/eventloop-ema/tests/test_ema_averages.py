"""The averages of a model, without a training."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from eventloop_ema import Averages, averaged_names


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def averages_of(model):
    return Averages(model, averaged_names(model))


def train(model):
    """Changes weights and statistics as a step would."""
    model(torch.randn(8, 1, 4, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_averages_are_those_of_torch(decay):
    """AveragedModel with torch's own rule is the reference, buffers included."""
    model = network()
    averages = averages_of(model)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    reference.update_parameters(model)

    for _ in range(5):
        train(model)
        averages.update(1 - decay)
        reference.update_parameters(model)

    expected = reference.module.state_dict()
    # torch has no mean of integers to offer: those stay what the training left.
    del expected["1.num_batches_tracked"]
    actual = averages.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6)
    assert not torch.allclose(actual["3.weight"], model[3].weight)


def test_averages_take_the_weights_place_and_give_it_back():
    """Whatever happens meanwhile, the training goes on with its own bits."""
    model = network()
    averages = averages_of(model)
    train(model)
    before = {name: one.clone() for name, one in model.state_dict().items()}

    with pytest.raises(ArithmeticError), averages.in_place():
        inside = {name: one.clone() for name, one in model.state_dict().items()}
        raise ArithmeticError

    after = model.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert all(torch.equal(inside[name], one) for name, one in averages.state_dict().items())
    assert not torch.equal(inside["3.weight"], before["3.weight"])
    assert inside["1.num_batches_tracked"] == before["1.num_batches_tracked"] == 1


def test_gradients_can_be_taken_of_averages():
    """Who evaluates may want a gradient with respect to the inputs."""
    model = network()
    averages = averages_of(model)

    with averages.in_place():
        inputs = torch.randn(2, 1, 4, 4, requires_grad=True)
        model(inputs).sum().backward()

    assert inputs.grad is not None


class Masked(nn.Module):
    """Buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(2))
        self.mask = nn.Buffer(torch.tensor([0.0, -torch.inf]))
        self.cache = nn.Buffer(torch.zeros(2), persistent=False)
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.weight = nn.Parameter(torch.zeros(2))
        self.packed = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)


def test_what_has_no_mean_is_left_alone():
    """The mean of an infinity and itself isn't a number, and that of a cache nothing of use."""
    assert averaged_names(Masked()) == ["weight", "mean"]


def test_a_buffer_that_is_replaced_is_followed():
    """`self.mean = 0.9 * self.mean + ...` is how many write it."""
    model = Masked()
    averages = averages_of(model)

    model.mean = torch.ones(2)
    averages.update(0.5)
    with averages.in_place():
        inside = model.mean.clone()

    assert torch.equal(inside, torch.full((2,), 0.5))
    assert torch.equal(model.mean, torch.ones(2))


def test_tied_weights_stay_tied():
    """One parameter under two names has one average."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    averages = averages_of(model)
    with torch.no_grad():
        model[0].weight.add_(1)

    averages.update(0.5)
    with averages.in_place():
        tied = model[0].weight is model[1].weight
        inside = model[1].weight.clone()

    assert tied
    assert list(averages.state_dict()) == ["0.weight", "0.bias", "1.bias"]
    torch.testing.assert_close(inside, model[0].weight - 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_few_bits_are_averaged_in_float32(dtype):
    """In their own precision small moves round to nothing, and the average never gets there."""
    model = nn.Linear(1, 1).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1)
    averages = averages_of(model)
    stuck = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(2)

    for _ in range(2000):
        averages.update(0.001)
        stuck.lerp_(model.weight.detach(), 0.001)

    torch.testing.assert_close(
        averages.state_dict()["weight"].item(), 2 - 0.999**2000, atol=1e-3, rtol=0
    )
    assert abs(stuck.item() - (2 - 0.999**2000)) > 0.1
    assert model.weight.dtype == dtype


def test_a_state_is_taken_back_bit_by_bit():
    """What a resumed run goes on with."""
    model = network()
    averages = averages_of(model)
    train(model)
    averages.update(0.3)
    other = averages_of(network(1))

    other.load_state_dict(averages.state_dict())

    pairs = zip(averages.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_is_frozen_and_in_no_optimizer_is_not_averaged():
    """It stays as it is, and would make a checkpoint of adapters as large as the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)

    assert averaged_names(model) == ["1.weight", "1.bias"]
    assert averaged_names(model, [model[0].weight]) == ["0.weight", "1.weight", "1.bias"]
