"""The check: writers, in-place writes of callbacks, and reads of the device, each by name."""

from __future__ import annotations

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn

from eventloop import TaskError, hookimpl
from eventloop.toolbox import evaluation_mode
from eventloop_check import Check
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def make_task(**given):
    """Makes a task with one layer, whose parameters have short names, and without eval data."""
    return tiny_task(
        **{"model": lambda: nn.Linear(3, 3), "optimizer": sgd, "eval_dataloaders": None} | given
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_plugin(name, **hooks):
    """Makes a plugin of one function a hook."""
    methods = {hook: staticmethod(hookimpl(function)) for hook, function in hooks.items()}
    return type("Made", (), {"name": name, **methods})()


@pytest.fixture
def checked(make_trainer):
    """Trains for an epoch under a check, with one plugin; returns the check."""

    def checked(plugin=None, *, role="callbacks", task=None, **given):
        check = Check()
        plugins = {role: [plugin]} if plugin else {}
        make_trainer(task or make_task(), observers=[check], **plugins, **given).fit()
        return check

    return checked


def write_into(target):
    write = {
        "batch": lambda state: state.batch[0].add_(1),
        "outputs": lambda state: state.outputs.detach().zero_(),
        "loss": lambda state: state.loss.detach().mul_(2),
        "model": lambda state: next(state.model.parameters()).detach().add_(1),
        "gradient": lambda state: next(state.model.parameters()).grad.zero_(),
    }[target]

    def told(state):
        write(state)

    return told


@pytest.mark.parametrize("target", ["batch", "outputs", "loss", "model", "gradient"])
def test_a_callback_that_writes_in_place_is_named(target, checked):
    """The view can't stop it: it hands out the real tensors."""
    hook = "after_forward" if target == "outputs" else "after_train_batch"

    check = checked(make_plugin("sneaky", **{hook: write_into(target)}))

    (finding,) = check.findings
    assert finding.who == f"sneaky (Trainer(callbacks=...)), {hook}"
    assert f"wrote in place into state's {target}" in finding.what
    assert (finding.times, finding.moment) == (3, "epoch 1, batch 1, rank 0")
    assert __file__ in finding.where


def test_a_gradient_that_a_callback_takes_away_is_named(checked):
    """No tensor is written, but the step would be another."""

    def take(state):
        for parameter in state.model.parameters():
            parameter.grad = None

    check = checked(make_plugin("thief", after_train_batch=take))

    assert {finding.what for finding in check.findings} == {
        f"replaced or took away state's gradient {name}; a callback may only watch"
        for name in ("weight", "bias")
    }


def change_lr(state):
    state.optimizers["sgd"].param_groups[0]["lr"] *= 0.5


def replace_data(state):
    parameter = next(state.model.parameters())
    parameter.data = parameter.data.clone()


CHANGES = {
    "an option of an optimizer": (change_lr, "changed state's optimizer 'sgd' group 0 lr"),
    "data": (replace_data, "replaced the data of state's model weight"),
    "the mode": (lambda state: state.model.eval(), "changed state's model training"),
    "Python's generator": (lambda state: random.random(), "Python's random numbers"),
    "NumPy's generator": (lambda state: numpy.random.rand(), "NumPy's random numbers"),
    "torch's generator": (lambda state: torch.rand(1), "torch's random numbers"),
    "momentum": (
        lambda state: next(iter(state.optimizers["sgd"].state.values()))["momentum_buffer"].zero_(),
        "wrote in place into state's optimizer 'sgd' state 0 ['momentum_buffer']",
    ),
}


@pytest.mark.parametrize(("change", "what"), CHANGES.values(), ids=CHANGES)
def test_whatever_a_callback_changes_is_named(change, what, checked):
    """None of it is assigned to the State, and each makes another run."""
    meddler = make_plugin("meddler", batch_end=lambda state: (change(state), None)[1])

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    findings = checked(meddler, task=make_task(optimizer=optimizer)).findings

    assert [finding.who for finding in findings] == ["meddler (Trainer(callbacks=...)), batch_end"]
    assert what in findings[0].what
    assert checked(task=make_task(optimizer=optimizer)).findings == []


def test_either_half_of_a_wrapper_is_seen_and_what_it_encloses_is_not(checked):
    """The loop writes while a wrapper waits at its yield."""

    class Around:
        name = "around"

        def __init__(self, half):
            self.half = half

        @hookimpl(wrapper=True)
        def batch_end(self, state):
            if self.half == "first":
                state.batch[0].add_(1)
            result = yield
            if self.half == "second":
                state.batch[0].add_(1)
            return result

    found = {half: checked(Around(half)).findings for half in ("first", "second", "none")}

    assert [finding.times for finding in found["first"] + found["second"]] == [3, 3]
    assert found["none"] == []


def test_writers_are_listed_by_attribute_and_hook(checked):
    """Who changed the inputs is the first question when a run goes wrong."""

    class Writes:
        name = "writes"

        @hookimpl
        def before_forward(self, state):
            state.inputs = state.inputs * 2

        @hookimpl
        def after_backward(self, state):
            for parameter in state.model.parameters():
                parameter.grad.add_(1)

        @hookimpl(wrapper=True)
        def loss(self, state):
            result = yield
            state.targets = state.targets
            return result

    check = checked(Writes(), role="algorithms")

    assert [tuple(row) for row in check.rows()] == [
        ("gradient (in place)", "after_backward", "writes", "6"),
        ("inputs", "before_forward", "writes", "3"),
        ("targets", "loss", "writes", "3"),
    ]
    assert check.findings == []


@pytest.mark.parametrize(
    ("how", "read"),
    [
        ("item", lambda tensor: tensor.item()),
        ("item", lambda tensor: float(tensor)),
        ("item", lambda tensor: bool(tensor > 0)),
        ("tolist", lambda tensor: tensor.tolist()),
        # Of another device torch refuses it.
        pytest.param("numpy", lambda tensor: tensor.numpy(), marks=pytest.mark.about_cpu),
        ("print", lambda tensor: repr(tensor)),
        ("print", lambda tensor: f"{tensor[None]}"),
    ],
)
@pytest.mark.parametrize("role", ["callbacks", "algorithms"])
def test_a_read_of_the_device_is_named(how, read, role, checked):
    """On a GPU, each waits until everything before it is computed."""
    reader = make_plugin("reader", batch_end=lambda state: read(state.loss) and None)

    (finding,) = checked(reader, role=role).findings

    assert finding.who == f"reader (Trainer({role}=...)), batch_end"
    assert finding.what == f"read from the device with {how}()"
    assert finding.times == 3
    assert __file__ in finding.where


def test_a_list_of_a_tensor_of_the_device_is_one_read(make_trainer, pretend_device):
    """Torch copies it to the host first, which isn't another."""
    check = Check()
    reader = make_plugin("reader", batch_end=lambda state: state.loss.tolist() and None)

    make_trainer(make_task(), observers=[check], callbacks=[reader], device="pretend").fit()

    assert [finding.what for finding in check.findings] == ["read from the device with tolist()"]


def test_what_torch_reads_by_itself_is_blamed_on_no_plugin(checked):
    """Adam reads its own step count, a norm that must be finite itself: no plugin could do without."""

    class Steps:
        name = "steps"

        @hookimpl
        def optimizer_step(self, state, optimizers, closure):
            for optimizer in optimizers.values():
                nn.utils.clip_grad_norm_(state.model.parameters(), 1.0, error_if_nonfinite=True)
                optimizer.step()
            return True

    def optimizer(model):
        return torch.optim.Adam(model.parameters(), foreach=False)

    assert checked(Steps(), role="algorithms", task=make_task(optimizer=optimizer)).findings == []


def test_reads_in_the_tasks_model_are_named(checked):
    """They stand in nobody's hook, but cost as much."""

    class Reads(nn.Linear):
        def forward(self, inputs):
            assert inputs.sum().item() is not None
            return super().forward(inputs)

    (finding,) = checked(task=make_task(model=lambda: Reads(3, 3))).findings

    assert finding.who == "the task's model, in forward"
    assert __file__ in finding.where


@pytest.mark.parametrize("hook", ["epoch_end", "batch_checkpoint", "fit_end", "eval_batch_end"])
def test_a_read_outside_of_a_step_is_nobodys_business(hook, checked):
    """Between two steps, and in evaluation, there is nothing to wait for."""
    reader = make_plugin("reader", **{hook: lambda: torch.ones(()).item() and None})

    assert checked(reader, task=make_task(eval_dataloaders=tiny_batches())).findings == []


def test_a_loss_of_all_samples_at_once_is_no_obstacle(checked):
    """Under vmap the batch and the outputs of the State are tensors without an address."""
    found = []

    class Looks:
        """Asks for the loss of each sample."""

        @hookimpl
        def before_train_batch(self, state):
            outputs, targets = state.call("forward"), state.targets

            def loss(output, target):
                state.outputs, state.targets = output[None], target[None]
                return state.call("loss")

            batch = state.batch
            found.append(torch.func.vmap(loss)(outputs.detach(), targets))
            state.batch, state.outputs = batch, None

    check = checked(Looks(), role="algorithms")

    assert check.findings == []
    assert [one.shape for one in found] == [(4,)] * 3


def test_a_run_without_plugins_has_nothing_to_report(checked):
    """The core and a tame task keep to the rules that are checked."""
    check = checked(task=make_task(eval_dataloaders=tiny_batches()))

    assert (check.findings, list(check.rows())) == ([], [])


def test_tensors_are_as_they_were_afterwards(checked):
    """What the check puts in torch's place is taken back."""
    before = dict(vars(torch.Tensor))

    checked(make_plugin("reader", batch_end=lambda state: state.loss.tolist() and None))

    assert dict(vars(torch.Tensor)) == before


class StopsAlone:
    """Answers on rank 1 alone."""

    name = "alone"

    @hookimpl
    def should_stop(self, state):
        return state.rank == 1 and state.clock.batch == 2


class StopsTogether:
    """Answers alike on all ranks."""

    name = "together"

    @hookimpl
    def should_stop(self, state):
        return state.clock.batch == 2


@pytest.mark.parametrize("plugin", [StopsAlone, StopsTogether])
def test_answers_that_differ_between_ranks_are_found(tmp_path, plugin):
    """They would send one rank out of the loop, and leave the others waiting."""

    def run():
        check = Check()
        given = {"callbacks": [plugin()], "observers": [check], "max_duration": "2ba"}
        with isolated_trainer(tmp_path, **given) as trainer:
            trainer.fit()
        return [str(finding) for finding in check.findings]

    for findings in run_ranks(run):
        if plugin is StopsTogether:
            assert findings == []
        else:
            (finding,) = findings
            assert "alone" in finding
            assert "rank 0 False, rank 1 True" in finding


def call_forward(state):
    with contextlib.suppress(TaskError):  # no batch is under way
        state.call("forward")


ACTS = {
    "assigns": (lambda state: setattr(state, "until", state.until), "assigned state's until"),
    "replaces": (lambda state: setattr(state, "eval_name", "x"), "assigned state's eval_name"),
    "writes": (
        lambda state: state.model.bias.detach().add_(0),
        "wrote in place into state's model bias",
    ),
    "draws": (lambda state: torch.rand(1), "drew from, or seeded, torch's random numbers"),
    "logs": (lambda state: state.log("asker/x", 1.0), "called state's log"),
    "stops": (lambda state: state.request_stop("enough"), "called state's request_stop"),
    "saves": (lambda state: state.request_checkpoint(), "called state's request_checkpoint"),
    "calls": (call_forward, "called state's call"),
}


@pytest.mark.parametrize("role", ["callbacks", "algorithms"])
@pytest.mark.parametrize("act", ["logs", "stops", "saves"])
def test_a_question_that_acts_is_named(act, role, checked):
    """Who asks twice, or asks one plugin less, would get another run."""
    do, what = ACTS[act]

    (finding,) = checked(make_plugin("asker", should_eval=do), role=role).findings

    assert finding.who == f"asker (Trainer({role}=...)), should_eval"
    assert finding.what == f"{what}; a question only answers"
    assert __file__ in finding.where


@pytest.mark.parametrize("act", ["assigns", "draws", "writes", "calls"])
def test_a_question_in_which_an_algorithm_changes_the_run_is_named(act, checked):
    """In an event it may."""
    do, what = ACTS[act]

    (finding,) = checked(
        make_plugin("asker", should_eval=lambda state: (do(state), None)[1]), role="algorithms"
    ).findings

    assert finding.what == f"{what}; a question only answers"


@pytest.mark.parametrize("act", ["replaces", "draws", "writes", "logs", "stops"])
@pytest.mark.parametrize("hook", ["unsuitable", "header_note"])
def test_what_a_plugin_says_about_itself_changes_nothing(hook, act, make_trainer):
    """A run whose header isn't printed would be another one."""
    do, what = ACTS[act]
    teller = make_plugin("teller", **{hook: lambda state: (do(state), None)[1]})
    check = Check()

    trainer = make_trainer(make_task(), observers=[check], algorithms=[teller])
    assert not trainer.notes

    (finding,) = check.findings
    assert finding.who == f"teller (Trainer(algorithms=...)), {hook}"
    assert finding.what == f"{what}; a collection only answers"


def test_a_plugin_may_try_the_batch_before_it_says_that_it_is_unsuitable(make_trainer):
    """It leaves no trace."""

    def tries(state):
        batch = state.batch
        with evaluation_mode(state):
            state.outputs = state.call("forward")
        state.batch = batch

    check = Check()
    make_trainer(
        make_task(), observers=[check], algorithms=[make_plugin("trier", unsuitable=tries)]
    )

    assert not check.findings


@pytest.mark.parametrize("act", ACTS)
def test_an_event_may_act_and_a_question_may_answer(act, checked):
    """Control: what is named in a question is an algorithm's right in an event."""
    do, _ = ACTS[act]
    acts = make_plugin(
        "acts",
        batch_checkpoint=lambda state: (do(state), None)[1],
        should_eval=lambda state: state.clock.batch == 2,
        should_stop=lambda state: state.stop_reason is not None,
    )

    assert checked(acts, role="algorithms").findings == []
