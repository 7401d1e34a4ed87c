"""Layers are replaced wherever they stand, and the rest of the model stays what it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop import hookimpl
from eventloop.toolbox import replace_modules, with_class
from eventloop_testing import tiny_batches, tiny_task


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Wrapped(nn.Module):
    """A replacement that holds what it replaces, and something of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        return self.gain * self.inner(inputs)


def doubled(linear):
    return with_class(linear, Doubled)


def nested():
    """A model with the same activation in two places, and linear layers at two depths."""
    shared = nn.ReLU()
    inner = nn.Sequential(nn.Linear(3, 3), shared)
    return nn.Sequential(nn.Linear(3, 3), shared, inner)


def test_what_is_replaced_is_told_by_name():
    """The order is the model's, whatever stands inside of what."""
    model = nested()
    linears = {"0": model[0], "2.0": model[2][0]}

    same, replaced = replace_modules(model, {nn.Linear: doubled})

    assert same is model
    assert list(replaced.items()) == list(linears.items())
    assert isinstance(model[0], Doubled)
    assert isinstance(model[2][0], Doubled)


def test_a_model_with_replaced_layers_computes_with_them():
    """The old ones are used nowhere any more."""
    model = nested()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    first = 2 * model[0](inputs)
    expected = (2 * model[2][0](first.relu())).relu()

    model, _ = replace_modules(model, {nn.Linear: doubled})

    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_a_shared_module_is_replaced_by_one():
    """Two would no longer share their weights."""
    model = nested()

    _, replaced = replace_modules(model, {nn.ReLU: lambda _: nn.GELU()})

    assert list(replaced) == ["1", "2.1"]
    assert isinstance(model[1], nn.GELU)
    assert model[1] is model[2][1]


def test_a_module_twice_in_one_parent_is_replaced_in_both_places():
    """`named_children` would give it once."""
    pool = nn.MaxPool2d(2)
    model = nn.Sequential(pool, nn.ReLU(), pool)

    _, replaced = replace_modules(model, {nn.MaxPool2d: lambda _: nn.AvgPool2d(2)})

    assert list(replaced) == ["0", "2"]
    assert model[0] is model[2]


def test_the_model_itself_may_be_replaced():
    """It has no parent, so that the caller gets the new one."""
    linear = nn.Linear(3, 3)

    model, replaced = replace_modules(linear, {nn.Linear: Wrapped})

    assert isinstance(model, Wrapped)
    assert model.inner is linear
    assert replaced == {"": linear}


def test_inner_modules_come_first():
    """A factory for a block finds it with its layers replaced."""
    seen = []
    block = nn.Sequential(nn.Linear(3, 3))
    model = nn.ModuleDict({"block": block})

    _, replaced = replace_modules(
        model, {nn.Sequential: lambda one: seen.append(type(one[0])), nn.Linear: doubled}
    )

    assert seen == [Doubled]
    assert list(replaced) == ["block.0"]


def test_the_same_surgery_again_changes_nothing():
    """A subclass is another class: what was replaced isn't replaced a second time."""
    model, _ = replace_modules(nested(), {nn.Linear: doubled})
    modules = dict(model.named_modules())

    again, replaced = replace_modules(model, {nn.Linear: doubled})

    assert replaced == {}
    assert dict(again.named_modules()) == modules


def test_a_factory_may_leave_a_module():
    """By None, or by giving it back."""
    model = nested()

    _, replaced = replace_modules(model, {nn.Linear: lambda one: None, nn.ReLU: lambda one: one})

    assert replaced == {}


def test_a_factory_that_gives_no_module_is_named():
    """`model.0 = None` would fail in the first forward pass."""
    with pytest.raises(TypeError, match="factory for Linear gave 3"):
        replace_modules(nested(), {nn.Linear: lambda _: 3})


def test_mode_device_and_dtype_are_those_of_what_was_there():
    """A model in float64, or in parts in evaluation mode, must stay so."""
    model = nested().double()
    model[2].eval()

    replace_modules(model, {nn.Linear: Wrapped})

    assert model[0].gain.dtype == model[2][0].gain.dtype == torch.float64
    assert model[0].steps.dtype == torch.int64
    assert (model[0].training, model[2][0].training) == (True, False)


def test_new_tensors_go_to_the_device_of_the_old_ones():
    """A model on a GPU with a layer on the host fails at the first batch."""
    model = nested().to("meta")

    replace_modules(model, {nn.ReLU: lambda _: nn.PReLU(), nn.Linear: Wrapped})

    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"meta"}


def test_kept_parameters_are_the_same_objects_and_stay_frozen():
    """Whoever holds them goes on training the model."""
    linear = nn.Linear(3, 3)
    linear.weight.requires_grad_(False)
    before = dict(linear.named_parameters())

    wrapped = replace_modules(linear, {nn.Linear: Wrapped}).model
    again = replace_modules(linear, {nn.Linear: doubled}).model

    assert all(param is wrapped.inner.get_parameter(name) for name, param in before.items())
    assert all(param is again.get_parameter(name) for name, param in before.items())
    assert wrapped.gain.requires_grad
    assert not again.weight.requires_grad


def test_a_new_parameter_is_frozen_where_the_old_one_of_its_name_was():
    """Surgery on a frozen part must not thaw it."""
    linear = nn.Linear(3, 3)
    linear.weight.requires_grad_(False)

    made = replace_modules(linear, {nn.Linear: lambda old: nn.Linear(3, 6)}).model

    assert (made.weight.requires_grad, made.bias.requires_grad) == (False, True)


def test_another_class_keeps_hooks_and_names_and_shares_no_container():
    """What is registered with the new module isn't with the old one."""
    linear = nn.Linear(3, 3)
    linear.register_forward_hook(lambda module, args, outputs: outputs + 1)
    inputs = torch.ones(1, 3)
    expected = 2 * (linear(inputs) - 1) + 1

    made = with_class(linear, Doubled)
    made.register_buffer("filter", torch.ones(2))

    torch.testing.assert_close(made(inputs), expected)
    assert list(linear.state_dict()) == ["weight", "bias"]
    assert made.training == linear.training


class Operates:
    """An algorithm that replaces layers by others of the same names."""

    name = "operates"

    @hookimpl
    def init(self, state):
        state.model, self.replaced = replace_modules(state.model, {nn.Linear: doubled})


def flat(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()])


def test_a_run_trains_what_was_put_in(make_trainer):
    """Optimizers are built afterwards, and files have the names that they have without."""
    plain = make_trainer(tiny_task())
    operates = Operates()
    trainer = make_trainer(tiny_task(), algorithms=[operates])
    before = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}

    trainer.fit()

    after = trainer.state.model.state_dict()
    assert list(operates.replaced) == ["0", "2"]
    assert before.keys() == after.keys() == plain.state.model.state_dict().keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_is_operated_on_again(make_trainer, tmp_path):
    """The model is built, then `init`, then what was saved is put in: the bits of one in one go."""
    task = tiny_task(train_dataloader=tiny_batches(6))
    given = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
    whole = make_trainer(task, algorithms=[Operates()], **given)
    whole.fit()
    folder = tmp_path / "stopped"
    first = make_trainer(task, algorithms=[Operates()], run_dir=folder, **given)
    first.fit(until="8ba")
    first.close()

    resumed = make_trainer(task, algorithms=[Operates()], run_dir=folder, **given)
    resumed.fit()

    expected = whole.state.model.state_dict()
    for name, value in resumed.state.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_factories_are_called_in_the_order_of_registration():
    """One that draws its weights draws those that a loop over the modules would; inside out."""
    called = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 3)

    model = nn.Sequential(nn.Linear(1, 2), Block(), nn.Linear(3, 4))

    def made(old):
        called.append(getattr(old, "out_features", "block"))
        return None if isinstance(old, Block) else nn.Linear(old.in_features, old.out_features)

    surgery = replace_modules(model, {nn.Linear: made, Block: made})

    assert called == [2, 2, 3, "block", 4]
    assert list(surgery.replaced) == ["0", "1.first", "1.second", "2"]
