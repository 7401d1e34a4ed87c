"""fp16: the loss is scaled, the gradients aren't, and a step that overflowed is never made."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from eventloop import hookimpl
from eventloop.errors import NonFiniteError, SettingError
from eventloop.training.grad_scaling import StepOutcome

FIRST_SCALE = 65_536.0


class Overflow:
    """Has gradients overflow in the batches of which `when` is true."""

    name = "overflow"

    def __init__(self, when=lambda batch: True) -> None:
        self.when = when

    @hookimpl
    def after_backward(self, state):
        if self.when(state.clock.batch):
            next(state.model.parameters()).grad.view(-1)[0] = torch.inf


@pytest.fixture
def make_fp16(make_trainer, make_task):
    """Builds trainers in fp16, with momentum and a scheduler that halves the rate each step."""

    def make_fp16(*algorithms, callbacks=(), optimizer=None, **given):
        task = make_task(
            optimizer=optimizer
            or (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False)),
            scheduler=lambda one: StepLR(one, step_size=1, gamma=0.5),
        )
        settings = {"precision": "fp16", "max_duration": "1ep"} | given
        return make_trainer(task, algorithms=algorithms, callbacks=callbacks, **settings)

    return make_fp16


def rate(trainer, name: str = "sgd") -> float:
    return trainer.state.optimizers[name].param_groups[0]["lr"]


def scale(trainer) -> float:
    return trainer.state.precision.state_dict()["scaler"]["scale"]


def weights(trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.state.model.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_fifty_skipped_steps_change_nothing_but_the_scale(fused, make_fp16):
    """Weights, momentum and schedulers are those of a run that hasn't seen these batches."""

    def optimizer(model):
        return SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)

    trainer = make_fp16(Overflow(lambda batch: batch >= 3), optimizer=optimizer)
    trainer.fit(until="3ba")
    before, momentum = weights(trainer), trainer.state.optimizers["sgd"].state_dict()["state"]
    momentum = [one["momentum_buffer"].clone() for one in momentum.values()]

    trainer.fit(until="53ba")

    after = trainer.state.optimizers["sgd"].state_dict()["state"].values()
    assert same(weights(trainer), before)
    assert same([one["momentum_buffer"] for one in after], momentum)
    assert (rate(trainer), scale(trainer)) == (0.1 * 0.5**3, FIRST_SCALE * 0.5**50)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_fused_optimizer_may_begin_with_skipped_steps(kind, make_fp16):
    """As a scale that is still too large makes it; torch's own SGD goes on with momenta of noise."""
    given = {"momentum": 0.9} if kind is SGD else {}
    runs = [
        make_fp16(
            Overflow(lambda batch: batch < 2),
            optimizer=lambda model: kind(model.parameters(), lr=0.1, fused=fused, **given),
        )
        for fused in (True, False)
    ]
    for trainer in runs:
        trainer.fit()

    torch.testing.assert_close(*map(weights, runs))


def test_each_batch_logs_whether_it_overflowed(make_fp16, make_plugin):
    """With the batch that it happened in, though it is known later; other precisions are silent."""
    heard = {}
    listener = make_plugin(
        log=lambda numbers, at: heard.update({at.batch: numbers.get("train/overflow")})
    )

    make_fp16(Overflow(lambda batch: batch == 1), callbacks=[listener]).fit()
    in_fp16 = dict(heard)
    make_fp16(callbacks=[listener], precision="bf16").fit()

    assert in_fp16 == {1: 0.0, 2: 1.0, 3: 0.0}
    assert heard == dict.fromkeys(in_fp16)


@pytest.mark.parametrize("fused", [False, True])
def test_the_result_of_a_step_says_whether_it_was_made(fused, make_fp16):
    """To whoever wraps it, and waits."""
    results = []

    class Watch:
        name = "watch"

        @hookimpl(wrapper=True)
        def optimizer_step(self, state):
            result = yield
            results.append((type(result), bool(result)))
            return result

    make_fp16(
        Overflow(lambda batch: batch == 1),
        Watch(),
        optimizer=lambda model: SGD(model.parameters(), lr=0.1, fused=fused),
    ).fit()

    assert results == [(StepOutcome, True), (StepOutcome, False), (StepOutcome, True)]


@pytest.mark.parametrize("hook", ["eval_before_all", "epoch_end", "fit_end"])
def test_schedulers_have_followed_before_whoever_could_miss_it(hook, make_fp16, make_batches,
                                                               make_plugin):  # fmt: skip
    """They move late, not never: what is evaluated or saved has the rate of the next step."""
    rates = []
    watch = make_plugin(
        **{hook: lambda state: rates.append(state.optimizers["sgd"].param_groups[0]["lr"])},
        build_eval_dataloaders=lambda state: {"test": make_batches()},
    )

    make_fp16(watch, Overflow(lambda batch: batch == 1)).fit()

    assert rates == [0.1 * 0.5**2]


def test_schedulers_have_followed_before_a_checkpoint(make_fp16, make_plugin, tmp_path):
    """A run that goes on from it must not be one move behind."""
    rates = []

    def save_checkpoint(state):
        rates.append(state.optimizers["sgd"].param_groups[0]["lr"])
        return tmp_path

    saver = make_plugin(
        save_checkpoint=save_checkpoint, batch_end=lambda state: state.request_checkpoint()
    )

    make_fp16(saver).fit()

    assert rates == [0.05, 0.025, 0.0125]


def test_schedulers_follow_before_the_next_step(make_fp16, make_plugin):
    """Each step uses the rate that it has in other precisions."""
    rates = {"fp16": [], "fp32": []}

    for precision, seen in rates.items():

        def look(state):
            seen.append(rate_of(state))

        watch = make_plugin(batch_end=look)
        make_fp16(callbacks=[watch], precision=precision).fit()

    assert rates["fp16"] == rates["fp32"] == [0.1, 0.05, 0.025]


def rate_of(state) -> float:
    return state.optimizers["sgd"].param_groups[0]["lr"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("skips", ["should_skip_step", "should_skip_batch"])
def test_schedulers_rest_where_a_plugin_skips(skips, precision, make_fp16, make_plugin):
    """The step before it still counts."""
    skipper = make_plugin(**{skips: lambda state: state.clock.batch == 1})
    trainer = make_fp16(skipper, precision=precision)

    trainer.fit()

    assert rate(trainer) == 0.025


def test_what_overflows_in_one_optimizer_is_used_by_none(make_fp16):
    """A step is made as a whole; a norm over all gradients is infinite with one of them."""
    trainer = make_fp16(
        Overflow(),
        optimizer=lambda model: {"sgd": SGD([model.weight], lr=0.1),
                                 "other": Adam([model.bias], lr=0.1)},
    )  # fmt: skip
    before = weights(trainer)

    trainer.fit(until="1ba")

    assert same(weights(trainer), before)
    assert (rate(trainer), rate(trainer, "other")) == (0.1, 0.1)
    assert scale(trainer) == FIRST_SCALE / 2


def test_an_optimizer_without_gradients_steps_as_ever(make_fp16, make_plugin):
    """A part of the model that wasn't used has nothing to unscale."""
    trainer = make_fp16(
        make_plugin(after_backward=lambda state: setattr(state.model.bias, "grad", None)),
        optimizer=lambda model: {"sgd": SGD([model.weight], lr=0.1),
                                 "idle": SGD([model.bias], lr=0.1)},
    )  # fmt: skip
    before = weights(trainer)

    trainer.fit()

    moved = [not torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True)]
    assert moved == [True, False]


def test_gradients_are_scaled_until_they_are_clipped(make_fp16, make_plugin):
    """Whoever clips, measures or adds to them sees true gradients."""
    norms = {}

    def note(hook):
        return lambda state: norms.update({hook: state.model.weight.grad.norm()})

    def clip_gradients(state, optimizers):
        note("clip_gradients")(state)
        return {}

    hooks = ("after_backward", "after_train_batch")
    plugin = make_plugin(clip_gradients=clip_gradients, **{hook: note(hook) for hook in hooks})

    make_fp16(plugin).fit(until="1ba")

    assert norms["clip_gradients"] == norms["after_train_batch"] < 10
    assert norms["after_backward"] == norms["clip_gradients"] * FIRST_SCALE


class AtAnotherPoint:
    """Steps with the gradient of the weights that a first step led to, as SAM does."""

    name = "at-another-point"

    def __init__(self, steps_first: bool = False, overflow_in_closure: bool = False) -> None:
        self.steps_first = steps_first
        self.overflow_in_closure = overflow_in_closure

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, closure):
        params = list(state.model.parameters())
        kept = [param.detach().clone() for param in params]
        if self.steps_first:
            yield
        with torch.no_grad():
            for param in params:
                param.sub_(param.grad, alpha=0.01)
        closure()
        if self.overflow_in_closure:
            params[0].grad.view(-1)[0] = torch.inf
        with torch.no_grad():
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)
        return state.again() if self.steps_first else (yield)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps_first", [False, True])
def test_a_wrapper_may_step_with_the_gradients_of_a_closure(steps_first, fused, make_fp16):
    """As in other precisions, to the rounding of float16."""

    def optimizer(model):
        return SGD(model.parameters(), lr=0.1, fused=fused)

    trainers = [
        make_fp16(AtAnotherPoint(steps_first), optimizer=optimizer, precision=precision)
        for precision in ("fp16", "fp32")
    ]
    before = weights(trainers[0])
    for trainer in trainers:
        trainer.fit()

    torch.testing.assert_close(*map(weights, trainers), rtol=0, atol=2e-3)
    assert not same(weights(trainers[0]), before)
    assert scale(trainers[0]) == FIRST_SCALE


@pytest.mark.parametrize("fused", [False, True])
def test_what_overflowed_before_a_closure_skips_the_step(fused, make_fp16):
    """The closure was called with weights that the overflow had spoilt."""
    trainer = make_fp16(
        Overflow(),
        AtAnotherPoint(),
        optimizer=lambda model: SGD(model.parameters(), lr=0.1, fused=fused),
    )
    before = weights(trainer)

    trainer.fit(until="1ba")

    assert same(weights(trainer), before)
    assert scale(trainer) == FIRST_SCALE / 2


def test_batches_without_any_gradient_change_nothing(make_fp16, make_plugin):
    """Nothing overflowed that could be known of; the next batch is as good as the first."""

    def forget(state):
        for param in state.model.parameters():
            param.grad = None

    trainer = make_fp16(make_plugin(after_backward=forget))
    before = weights(trainer)

    trainer.fit()

    assert same(weights(trainer), before)
    assert scale(trainer) == FIRST_SCALE


def test_a_strategy_may_raise_the_flags(make_fp16, make_plugin):
    """Where each rank holds a part of the gradients, it takes the maximum over the ranks."""

    def reduce(state):
        for flag in state.precision.found_inf():
            flag.fill_(1)

    trainer = make_fp16(make_plugin(after_train_batch=reduce))
    before = weights(trainer)

    trainer.fit(until="1ba")

    assert same(weights(trainer), before)
    assert (rate(trainer), scale(trainer)) == (0.1, FIRST_SCALE / 2)


def test_a_wrapper_of_the_batch_sees_the_flags(make_fp16, make_plugin):
    """An average follows the steps that were made, and can't wait for the device to know them."""
    seen = []

    class Follows:
        @hookimpl(wrapper=True)
        def train_batch(self, state):
            stepped = yield
            seen.append((bool(stepped), [flag.item() for flag in state.precision.found_inf()]))
            return stepped

    make_fp16(Overflow(lambda batch: batch == 1), Follows()).fit()

    assert seen == [(True, [0.0]), (False, [1.0]), (True, [0.0])]


def test_an_owner_of_the_batch_needs_no_clipping(make_fp16, make_plugin):
    """What it steps with is unscaled by the step at the latest."""

    def train_batch(state):
        outputs = state.model(state.inputs)
        state.precision.backward(nn.functional.cross_entropy(outputs, state.targets))
        return state.precision.step(state.optimizers["sgd"])

    owned = make_fp16(make_plugin(train_batch=train_batch), optimizer=plain_sgd)
    expected = make_fp16(precision="fp32", optimizer=plain_sgd)
    for trainer in (owned, expected):
        trainer.fit(until="1ba")

    torch.testing.assert_close(weights(owned), weights(expected))
    assert rate(owned) == 0.05


def plain_sgd(model) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def test_a_fit_after_one_that_raised_starts_clean(make_fp16, make_plugin):
    """What half a batch left is neither unscaled twice nor taken for an overflow; it is repeated."""

    def raise_once(state):
        if state.clock.batch == 0 and not raised:
            raised.append(True)
            for flag in state.precision.found_inf():
                flag.fill_(1)
            raise KeyError("once")

    raised = []
    trainer = make_fp16(make_plugin(after_train_batch=raise_once))
    with pytest.raises(KeyError):
        trainer.fit()

    trainer.fit()

    assert (rate(trainer), scale(trainer)) == (0.1 * 0.5**3, FIRST_SCALE)


@pytest.mark.nightly
def test_a_thousand_skipped_steps_in_a_row_stop_the_run(make_fp16):
    """Nothing is learned any more, and nobody watches a run for days; one made in between helps."""
    trainer = make_fp16(Overflow(lambda batch: batch != 500), max_duration="2000ba")

    with pytest.raises(
        NonFiniteError,
        match=r"1,000 steps in a row were skipped.*scale of the loss is down to 7.89e-31\n  fix  set prec",
    ):
        trainer.fit()

    assert trainer.state.clock.batch == 1501
    assert all(param.isfinite().all() for param in trainer.state.model.parameters())


def test_the_scale_survives_as_json(make_fp16):
    """A checkpoint holds it, and a run that goes on doesn't calibrate again."""
    first, second = make_fp16(Overflow()), make_fp16()
    first.fit()

    written = json.dumps(first.state.precision.state_dict())
    second.state.precision.load_state_dict(json.loads(written))

    assert second.state.precision.state_dict() == json.loads(written)
    assert (scale(second), json.loads(written)["num_skipped"]) == (FIRST_SCALE / 8, 3)


def test_a_run_may_go_on_in_another_precision(make_fp16):
    """The scale is of no use to bf16, and fp16 finds one by itself."""
    fp16, bf16 = (make_fp16(precision=precision).state.precision for precision in ("fp16", "bf16"))

    bf16.load_state_dict(fp16.state_dict())
    fp16.load_state_dict(bf16.state_dict())

    assert bf16.state_dict() == {}
    assert fp16.state_dict()["scaler"]["scale"] == FIRST_SCALE


def test_an_optimizer_that_needs_a_closure_is_refused(make_fp16):
    """When the trainer is built; GradScaler can't take its losses back."""
    with pytest.raises(
        SettingError, match=r"fp16', but the optimizer 'lbfgs' is LBFGS[\s\S]*fix  set precision to"
    ):
        make_fp16(optimizer=lambda model: torch.optim.LBFGS(model.parameters()))


def test_parameters_in_float16_are_refused(make_trainer, make_task):
    """Their updates would vanish, and GradScaler refuses their gradients at the first step."""
    task = make_task(model=lambda: nn.Linear(3, 3).half())

    with pytest.raises(SettingError, match=r"the parameter 'weight' is float16[\s\S]*float\(\)"):
        make_trainer(task, precision="fp16")
