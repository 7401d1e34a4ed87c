"""Precision: one object a mode, with the same methods."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from eventloop.errors import SettingError
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.training.precision import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_precision_is_chosen_by_name(name):
    """And says its name, for header and manifest."""
    assert choose_precision(name, CPU).name == name


def test_auto_is_full_precision_on_the_host():
    """bf16 is emulated there: slower, and no less memory."""
    assert choose_precision("auto", CPU).name == "fp32"


def test_an_unknown_precision_is_refused():
    """With those that there are."""
    with pytest.raises(
        SettingError, match=r"no precision is named 'fp8'[\s\S]*auto, fp32, tf32, bf16, fp16"
    ):
        choose_precision("fp8", CPU)


@pytest.mark.about_cpu
def test_tf32_is_refused_on_the_host(make_trainer):
    """When the trainer is built: a setting without an effect is an error."""
    with pytest.raises(SettingError, match=r"precision='tf32', but .* the device is cpu[\s\S]*fix"):
        make_trainer(precision="tf32")


def test_full_precision_costs_no_call():
    """The functions themselves, so that the loop pays nothing for the choice."""

    def plan():
        pass

    precision = choose_precision("fp32", CPU)

    assert precision.under_autocast(plan) is plan
    assert all(precision.enclose(hook, plan) is plan for hook in HOOKS)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_casts_inside_and_nowhere_else(name, dtype):
    """It ends with the call."""
    weight = torch.ones(2, 2)

    inside = choose_precision(name, CPU).under_autocast(torch.mm)(weight, weight)

    assert inside.dtype is dtype
    assert torch.mm(weight, weight).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
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


@pytest.mark.parametrize("action", ["forward", "loss", "eval_forward", "predict_forward"])
def test_an_owner_of_a_pass_runs_under_autocast(action, make_trainer, make_task, make_plugin):
    """Its operations would otherwise be those of another precision than the core's."""
    enabled = []

    def owned(state):
        enabled.append(torch.is_autocast_enabled(state.device.type))
        outputs = state.model(state.batch[0])
        return cross_entropy(outputs, state.batch[1]) if action == "loss" else outputs

    batches = make_task().train_dataloader
    task = make_task(eval_dataloaders=batches)
    trainer = make_trainer(task, algorithms=[make_plugin(**{action: owned})], precision="bf16")
    trainer.fit()
    trainer.predict(batches)

    assert set(enabled) == {True}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_backward_and_the_step_run_outside_of_autocast(precision, make_trainer, make_plugin):
    """As torch asks for."""
    enabled = {}

    def note(hook):
        return lambda state: enabled.update({hook: torch.is_autocast_enabled(state.device.type)})

    hooks = ("batch_start", "before_forward", "before_backward", "after_backward", "batch_end")
    watch = make_plugin(**{hook: note(hook) for hook in hooks})

    make_trainer(callbacks=[watch], precision=precision).fit()

    assert enabled == dict.fromkeys(hooks, False)
