"""Precision: one object a mode, with the same methods."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from eventloop.errors import SettingError
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.training.grad_scaling import Unscaled
from eventloop.training.precision import choose_precision

CPU = torch.device("cpu")


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """What torch says of a GPU: with bf16 in hardware or without, and of which capability."""

    def gpu(*, bf16: bool = True, capability: tuple[int, int] = (8, 0)) -> None:
        answers = {
            "is_bf16_supported": lambda including_emulation: bf16,
            "get_device_capability": lambda device: capability,
            "get_device_name": lambda device: "Tesla T4",
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    return gpu


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_precision_is_chosen_by_name(name):
    """And says its name, for header and manifest."""
    assert choose_precision(name, CPU).name == name


def test_auto_is_full_precision_on_the_host():
    """bf16 is emulated there: slower, and no less memory."""
    assert choose_precision("auto", CPU).name == "fp32"


@pytest.mark.parametrize(("bf16", "best"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_what_a_gpu_has_in_hardware(bf16, best, gpu, monkeypatch):
    """bf16 needs no scaling, where it isn't emulated."""
    gpu(bf16=bf16)
    monkeypatch.setattr(
        "eventloop.training.precision.Scaled", lambda device: Unscaled()
    )  # needs a GPU

    assert choose_precision("auto", GPU).name == best


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


@pytest.mark.parametrize("name", ["tf32", "bf16"])
def test_what_an_older_gpu_lacks_is_refused(name, gpu):
    """It would be emulated, and slower than float32."""
    gpu(bf16=False, capability=(7, 5))

    with pytest.raises(SettingError, match=f"precision={name!r}, but Tesla T4 doesn't have it"):
        choose_precision(name, GPU)


def products() -> tuple[str, bool]:
    """In what the process computes products of float32 on a GPU."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp32", ("highest", False)), ("tf32", ("high", True)), ("bf16", ("high", True))],
)
def test_tf32_is_allowed_where_float32_isnt_asked_for(name, expected, gpu):
    """Torch allows it for convolutions alone; fp32 must be float32 throughout."""
    gpu()
    before = products()

    with choose_precision(name, GPU).in_force():
        inside = products()

    assert inside == expected
    assert products() == before


def test_what_the_process_had_set_is_put_back_after_an_error(gpu):
    """Whoever catches it goes on computing as before."""
    gpu()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError), choose_precision("fp32", GPU).in_force():
            raise KeyError

        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


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
