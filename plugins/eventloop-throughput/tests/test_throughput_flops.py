"""The operations of a model."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from eventloop_throughput import ForwardFlops
from eventloop_throughput.flops import shapes_of


class Attention(nn.Module):
    def forward(self, inputs):
        return nn.functional.scaled_dot_product_attention(inputs, inputs, inputs)


MODELS = {
    "linear": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (4, 6)),
    "convolutions": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)), (2, 3, 9, 9)),
}


def counted(flops, model, inputs):
    flops.before(model, inputs)
    model(inputs)
    return flops.after()


@pytest.mark.parametrize(("model", "shape"), MODELS.values(), ids=MODELS)
def test_operations_are_those_that_torch_counts(model, shape):
    """Of the forward pass; with inputs that want gradients, backward takes twice as many."""
    inputs = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        outputs = model(inputs)
    with FlopCounterMode(display=False) as backward:
        outputs.sum().backward()
    expected = forward.get_total_flops()

    assert counted(ForwardFlops(), model, inputs) == 3 * expected > 0
    assert backward.get_total_flops() == 2 * expected


def test_attention_on_a_cpu_counts():
    """Torch has the formula for GPUs only: two products, of 2 * batch * length * length * width."""
    inputs = torch.randn(2, 3, 10, 8)

    assert counted(ForwardFlops(), Attention(), inputs) == 3 * 2 * (2 * 6 * 10 * 10 * 8)


def test_a_pass_is_counted_once_and_the_model_left_as_it_was():
    """Counting each pass would slow the training that it measures."""
    model, inputs = nn.Sequential(nn.Linear(6, 5)), torch.randn(4, 6)
    flops = ForwardFlops()

    first = counted(flops, model, inputs)
    flops.before(model, inputs)

    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert flops.after() == first == 3 * 2 * 4 * 6 * 5


def test_other_shapes_are_counted_anew():
    """Images and sequences may grow over a run."""
    model, flops = nn.Conv2d(1, 1, 3, padding=1), ForwardFlops()

    small, large = (counted(flops, model, torch.randn(2, 1, size, size)) for size in (4, 8))

    assert large == 4 * small > 0


def test_shapes_without_end_are_estimated():
    """Texts of any length would be counted for ever."""
    model, flops = nn.Linear(6, 5), ForwardFlops()
    for length in range(1, 33):
        counted(flops, model, torch.randn(length, 6))

    flops.before(model, torch.randn(1000, 6))

    assert not model._forward_hooks
    assert flops.after() == 3 * 2 * 1000 * 6 * 5


def test_parts_of_a_model_count_too():
    """A GAN's task never calls the model as a whole."""
    model, flops = nn.ModuleDict({"D": nn.Linear(3, 4), "G": nn.Linear(4, 3)}), ForwardFlops()
    inputs = torch.randn(2, 3)

    flops.before(model, inputs)
    model["G"](model["D"](inputs))

    assert flops.after() == 3 * 2 * (2 * 2 * 3 * 4)


def test_a_pass_that_fails_leaves_nothing_behind():
    """Whoever goes on after it must not be counted, nor find a mode that nobody leaves."""
    model, flops = nn.Sequential(nn.Linear(6, 5)), ForwardFlops()
    flops.before(model, torch.randn(4, 7))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(4, 7))

    flops.give_up()

    assert counted(flops, model, torch.randn(4, 6)) == 3 * 2 * 4 * 6 * 5


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        (torch.zeros(2, 3), ((2, 3),)),
        ({"ids": torch.zeros(2, 3), "name": "x"}, ((2, 3),)),
        ([torch.zeros(2), torch.zeros(())], ((2,), ())),
        (None, ()),
    ],
)
def test_shapes_are_found_in_any_inputs(inputs, shapes):
    """A batch may be whatever the task's forward takes."""
    assert shapes_of(inputs) == shapes
