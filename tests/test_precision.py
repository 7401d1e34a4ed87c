"""Precision: one object a mode, with the same methods."""

from __future__ import annotations

import pytest
import torch

from eventloop.errors import SettingError
from eventloop.precision import Bfloat16, FullPrecision, choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "kind"), [("fp32", FullPrecision), ("bf16", Bfloat16)])
def test_a_precision_is_chosen_by_name(name, kind):
    """And says its name, for header and manifest."""
    chosen = choose_precision(name, CPU)

    assert isinstance(chosen, kind)
    assert chosen.name == name


def test_auto_is_full_precision_on_the_host():
    """bf16 is emulated there: slower, and no less memory."""
    assert choose_precision("auto", CPU).name == "fp32"


def test_an_unknown_precision_is_refused():
    """With those that there are."""
    with pytest.raises(SettingError, match=r"no precision is named 'fp8'[\s\S]*auto, fp32, bf16"):
        choose_precision("fp8", CPU)


def test_full_precision_costs_no_call():
    """The function itself, so that the loop pays nothing for the choice."""

    def forward():
        pass

    assert FullPrecision().under_autocast(forward) is forward


def test_bf16_casts_inside_and_nowhere_else():
    """Autocast ends with the call."""
    weight = torch.ones(2, 2)

    inside = Bfloat16(CPU).under_autocast(torch.mm)(weight, weight)

    assert inside.dtype is torch.bfloat16
    assert torch.mm(weight, weight).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_forward_and_loss_run_in_the_precision_of_the_run(
    precision, dtype, make_trainer, make_task, make_plugin, make_batches
):
    """In training, evaluation and prediction, wrappers included; the weights stay float32."""
    dtypes = {}

    def note(hook):
        return lambda state: dtypes.update({hook: state.outputs.dtype})

    hooks = ("after_forward", "eval_after_forward", "predict_after_forward")
    trainer = make_trainer(
        make_task(eval_dataloaders=make_batches()),
        callbacks=[make_plugin(**{hook: note(hook) for hook in hooks})],
        precision=precision,
    )
    trainer.fit()
    trainer.predict(make_batches())

    assert dtypes == dict.fromkeys(hooks, dtype)
    assert trainer.state.precision.name == precision
    assert {param.dtype for param in trainer.state.model.parameters()} == {torch.float32}


def test_backward_and_the_step_run_outside_of_autocast(make_trainer, make_plugin):
    """As torch asks for."""
    enabled = {}

    def note(hook):
        return lambda state: enabled.update({hook: torch.is_autocast_enabled("cpu")})

    hooks = ("batch_start", "before_forward", "before_backward", "after_backward", "batch_end")
    watch = make_plugin(**{hook: note(hook) for hook in hooks})

    make_trainer(callbacks=[watch], precision="bf16").fit()

    assert enabled == dict.fromkeys(hooks, False)
