"""Buffers that training grows: their average begins anew, and the run can be resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop_ema import Ema
from eventloop_ema.averages import Averages
from eventloop_testing import tiny_task


class Grows(nn.Module):
    """Keeps the means of its batches."""

    def __init__(self, *, starts_empty):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", None if starts_empty else torch.zeros(1, 3))

    def forward(self, inputs):
        if self.training:
            mean = inputs.detach().mean(0, keepdim=True)
            self.seen = mean if self.seen is None else torch.cat([self.seen, mean])
        return self.layer(inputs)


@pytest.mark.parametrize("starts_empty", [True, False])
@pytest.mark.parametrize("untils", [["1ep", None], ["4ba", "2ep", None]])
def test_a_resumed_run_has_the_averages_of_one_that_was_not_stopped(
    untils, starts_empty, make_trainer, tmp_path
):
    """The buffers of the checkpoint have shapes that the model is built without."""

    def averages(folder, *untils):
        for until in untils:
            ema = Ema(half_life="2ba")
            trainer = make_trainer(
                tiny_task(model=lambda: Grows(starts_empty=starts_empty)),
                algorithms=[ema],
                run_dir=tmp_path / folder,
                max_duration="3ep",
            )
            trainer.fit(until=until)
            trainer.close()
        return ema.averages.state_dict()

    expected, actual = averages("whole", None), averages("resumed", *untils)

    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value)


def test_the_average_of_a_buffer_of_another_shape_begins_anew():
    """There is no mean of tensors of different shapes; those of the parameters go on."""
    model = Grows(starts_empty=False)
    averages = Averages(model, ["layer.weight", "seen"])
    before = model.layer.weight.detach().clone()
    with torch.no_grad():
        model.layer.weight += 1
    model.seen = torch.ones(2, 3)

    averages.update(0.5)

    state = averages.state_dict()
    assert torch.equal(state["seen"], torch.ones(2, 3))
    torch.testing.assert_close(state["layer.weight"], before + 0.5)
    with averages.in_place():
        torch.testing.assert_close(model.layer.weight, before + 0.5)


def test_a_buffer_that_shrinks_to_a_shape_that_broadcasts_begins_anew():
    """An operation that broadcasts would go on in the old shape, without an error."""
    model = Grows(starts_empty=False)
    model.seen = torch.zeros(4, 3)
    averages = Averages(model, ["seen"])
    model.seen = torch.ones(1, 3)

    averages.update(0.5)

    assert torch.equal(averages.state_dict()["seen"], torch.ones(1, 3))
