"""What can't be distilled is refused, with what to do."""

import pytest
import torch
from torch import nn

from eventloop import PluginError, hookimpl
from eventloop_distill import Distill
from eventloop_testing import tiny_task


def not_a_model():
    return 3


class Updates:
    """Owns `train_batch`, and computes its loss by itself."""

    name = "updates"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: state.model(state.inputs).mean())


def test_a_teacher_that_is_trained_is_refused(make_trainer):
    """It would teach what it has just been taught."""
    model = nn.Linear(3, 3)

    with pytest.raises(PluginError, match="shares parameters with the model") as raised:
        make_trainer(tiny_task(model=model), algorithms=[Distill(teacher=nn.Sequential(model))])
    assert "copy.deepcopy" in str(raised.value)


def test_a_training_that_asks_for_no_loss_is_refused(make_trainer):
    """An option without effect is an error."""
    with pytest.raises(PluginError, match="no effect: train_batch is updates's"):
        make_trainer(algorithms=[Distill(teacher=nn.Linear(3, 3)), Updates()])


@pytest.mark.parametrize(
    ("teacher", "shown"),
    [
        (nn.Linear(3, 4), r"are of shape \(4, 3\), the teacher's of shape \(4, 4\)"),
        (nn.LSTM(3, 3), r"are of shape \(4, 3\), the teacher's tuple"),
    ],
)
def test_outputs_that_can_not_be_compared_are_named(make_trainer, teacher, shown):
    """A teacher of other classes teaches nothing."""
    with pytest.raises(PluginError, match=shown):
        make_trainer(algorithms=[Distill(teacher=teacher)]).fit()


def test_an_output_without_classes_is_refused(make_trainer):
    """The softmax of one output is 1: the loss would be scaled down, and nothing said."""
    task = tiny_task(model=nn.Linear(3, 1), loss=lambda outputs, targets: outputs.mean())

    with pytest.raises(PluginError, match=r"outputs of shape \(4, 1\) have one"):
        make_trainer(task, algorithms=[Distill(teacher=nn.Linear(3, 1))]).fit()


NAMES = {
    "no.such.module:net": "ModuleNotFoundError",
    "./nowhere.py:net": "FileNotFoundError",
    "torch.nn:Liner": "torch.nn has no 'Liner'",
    "torch.nn:Linear": "TypeError",
    f"{__name__}:not_a_model": "gives int, no nn.Module",
}


@pytest.mark.parametrize(("name", "shown"), NAMES.items(), ids=NAMES)
def test_a_name_that_leads_to_no_model_is_refused(make_trainer, name, shown):
    """When the trainer is built, with what it said."""
    with pytest.raises(PluginError, match="can't be built") as raised:
        make_trainer(algorithms=[Distill(teacher=name)])
    assert name in str(raised.value)
    assert shown in str(raised.value)
    assert "Distill(teacher=" in str(raised.value)


def test_weights_that_do_not_fit_are_refused(make_trainer, tmp_path):
    """A teacher that knows nothing would be worse than none."""
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    distill = Distill(teacher="torch.nn:Identity", weights=tmp_path / "w.safetensors")

    with pytest.raises(PluginError, match=r"with the weights in .*w\.safetensors: RuntimeError"):
        make_trainer(algorithms=[distill])


WRONG = {
    "temperature": ({"temperature": 0}, ValueError, "temperature=0 isn't a positive number"),
    "no number": ({"temperature": "x"}, TypeError, "temperature='x' is not a number"),
    "weight": ({"weight": 1.5}, ValueError, r"weight=1\.5 isn't in \(0, 1\]"),
    "name": ({"teacher": "net"}, ValueError, "teacher='net' names no function"),
    "kind": ({"teacher": 3}, TypeError, "teacher=3 is neither a name nor"),
    "weights": ({"weights": "w"}, ValueError, "weights='w' are for a teacher that is named"),
}


@pytest.mark.parametrize(("given", "kind", "shown"), WRONG.values(), ids=WRONG)
def test_an_option_out_of_its_range_is_refused(given, kind, shown):
    """With the value that was seen."""
    with pytest.raises(kind, match=shown):
        Distill(**({"teacher": nn.Identity()} | given))
