"""The task: values become hooks, in whatever shape people have their data and models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from eventloop import Task, Trainer, hookimpl
from eventloop.data import Microbatches
from eventloop.errors import TaskError


class WithLoss(nn.Module):
    """As models of language are: keywords in, an object with loss and logits out."""

    def __init__(self, as_mapping: bool = False):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.as_mapping = as_mapping

    def forward(self, inputs, labels):
        logits = self.layer(inputs)
        found = {"loss": cross_entropy(logits, labels), "logits": logits}
        return found if self.as_mapping else SimpleNamespace(**found)


@pytest.fixture
def fitted(make_trainer, make_task, make_batches):
    """Trains a task of these values; gives the weights."""

    def fitted(**given):
        trainer = make_trainer(make_task(**given), microbatch_size=2)
        trainer.fit()
        return [param.detach() for param in trainer.state.model.parameters()]

    return fitted


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_model_that_gives_its_own_loss_trains_the_same(as_mapping, fitted, make_batches):
    """Task(loss=...) may be left out where the outputs have `.loss`, or the key."""
    expected = fitted()
    mappings = [{"inputs": inputs, "labels": targets} for inputs, targets in make_batches()]

    actual = fitted(
        model=lambda: WithLoss(as_mapping),
        loss=None,
        train_dataloader=mappings,
        eval_dataloaders=mappings,
        metrics={"accuracy": Accuracy("multiclass", num_classes=3)},
    )

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Inputs(nn.Linear):
    """A model as most are: its `forward` takes no labels."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, pixels):
        return super().forward(pixels)


def test_labels_of_a_mapping_go_to_the_loss_alone(fitted, make_batches):
    """A model whose `forward` doesn't take them isn't given them."""
    expected = fitted()
    mappings = [{"pixels": inputs, "labels": targets} for inputs, targets in make_batches()]

    actual = fitted(model=Inputs, train_dataloader=mappings, eval_dataloaders=mappings)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_forward_of_ones_own_names_what_it_wants(fitted, make_batches):
    """Batches of three, two models in one, losses that need more: all of it fits in there."""
    expected = fitted()
    triples = [(inputs, {"ids": [targets]}, inputs) for inputs, targets in make_batches()]

    actual = fitted(
        train_dataloader=triples,
        forward=lambda batch, model: {"loss": cross_entropy(model(batch[0]), batch[1]["ids"][0])},
        loss=None,
    )

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_weights_of_a_loss_are_where_the_model_is(make_trainer, make_task, pretend_device):
    """Those of its classes, say; a loss is called with outputs of the device."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))

    make_trainer(make_task(loss=loss), device="pretend").fit()

    assert loss.weight.device.type == "pretend"


def test_forward_may_want_all_of_these(make_trainer, make_task, make_batches):
    """In evaluation and prediction as in training; nothing more than its parameters name."""
    given = []

    def forward(state, targets, inputs, batch, model, scale=1.0):
        given.append((state, targets, inputs, batch, model))
        return model(inputs)

    trainer = make_trainer(make_task(forward=forward))
    (made,) = make_batches(1)

    trainer.predict([made])

    ((state, targets, inputs, batch, model),) = given
    assert (state, model) == (trainer.state, trainer.state.model)
    assert inputs is batch[0]
    assert targets is batch[1]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(batch, made, strict=True))


def test_a_forward_that_wants_what_is_not_there_is_refused_with_the_closest(make_task):
    """When the task's hooks are made, not at the first batch."""
    task = make_task(forward=lambda model, input: model(input))

    with pytest.raises(
        TypeError, match="requires the unknown argument 'input'; the closest is 'inputs'"
    ):
        task.hooks()


def test_only_what_was_given_becomes_a_hook(make_task):
    """What is left out is the core's default, or a plugin's."""
    least = Task(model=nn.Linear(3, 3)).hooks()
    usual = make_task(metrics={}, num_tokens=lambda: 1).hooks()

    assert list(vars(least)) == ["build_model"]
    assert set(vars(usual)) == {"build_model", "build_train_dataloader", "build_optimizers", "loss",
                                "build_metrics", "count_batch"}  # fmt: skip


def test_a_model_or_what_makes_one(make_trainer, make_task):
    """A factory is called after seeding, a model is trained as it is."""
    model = nn.Linear(3, 3)
    trainers = [make_trainer(make_task(), seed=seed) for seed in (0, 0, 1)]

    weights = [trainer.state.model.weight for trainer in trainers]

    assert make_trainer(make_task(model=model)).state.model is model
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("wrap", [lambda loaders: loaders, lambda loaders: lambda: loaders])
def test_data_loaders_or_what_makes_them(wrap, make_trainer, make_task, make_batches):
    """One alone is called "eval"; each of several may be a factory as well."""
    alone = make_trainer(make_task(eval_dataloaders=wrap(make_batches(1))))
    several = make_trainer(
        make_task(eval_dataloaders=wrap({"a": make_batches(1), "b": lambda: make_batches(2)}))
    )

    lengths = {name: len(one) for name, one in several.state.eval_dataloaders.items()}

    assert list(alone.state.eval_dataloaders) == ["eval"]
    assert lengths == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": lambda: 3}, "the task's model is an int, not an nn.Module"),
        ({"train_dataloader": 3}, "train_dataloader is an int, which is not iterable"),
        ({"eval_dataloaders": {"a": 3}}, r"eval_dataloaders\['a'\] is an int"),
        ({"optimizer": lambda model: None}, "optimizer function returned None"),
        ({"optimizer": lambda model: {"d": 3}}, "optimizer 'd' is an int, not a torch.optim.Optim"),
        ({"scheduler": {"sdg": lambda one: StepLR(one, 1)}}, "named 'sdg'.*the closest is 'sgd'"),
        (
            {"metrics": {"accuracy": len}, "eval_dataloaders": [1]},
            "metric 'accuracy' is a builtin_function_or_method",
        ),
        (
            {"train_metrics": {"n": 3}},
            "metric 'n' is an int, neither a torchmetrics.Metric nor a function",
        ),
        (
            {"train_dataloader": lambda: DataLoader([], shuffle=True)},
            r"data set of a data loader is empty[\s\S]*test_task\.py[\s\S]*none to shuffle",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused_when_the_trainer_is_built(
    given, message, make_trainer, make_task
):
    """Before training, with the name of the value and what it was."""
    with pytest.raises(TaskError, match=message):
        make_trainer(make_task(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": SGD([torch.zeros(1)], lr=0.1)}, "takes a function of the model"),
        ({"optimizer": 0.1}, r"Task\(optimizer=...\) takes a function, not 0.1"),
        ({"loss": "mse"}, r"Task\(loss=...\) takes a function, not 'mse'"),
        ({"forward": 3}, r"Task\(forward=...\) takes a function, not 3"),
        ({"scheduler_interval": "epoch"}, "scheduler_interval='epoch' is none of 'ba', 'ep'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_at_once(given, message, make_task):
    """Where it was written."""
    with pytest.raises((TypeError, ValueError), match=message):
        make_task(**given)


@pytest.mark.parametrize("dtype", [int, numpy.int64])
def test_tokens_are_counted_on_the_host(dtype, make_trainer, make_task):
    """Any integer, before anything is copied to a device."""
    task = make_task(num_tokens=lambda inputs: dtype(inputs.numel()))
    trainer = make_trainer(task, microbatch_size=2)

    trainer.fit()

    assert type(trainer.state.clock.token) is int
    assert trainer.state.clock.token == 36


def test_samples_and_tokens_are_counted_once_a_batch(make_trainer, make_task):
    """Microbatches are weighed, not counted: their tokens may be on a device."""
    asked = []
    task = make_task(num_tokens=lambda inputs: asked.append(len(inputs)) or 1)

    make_trainer(task, microbatch_size=1).fit()

    assert asked == [4, 4, 4]


def test_a_scheduler_belongs_to_each_optimizer(make_trainer, make_task):
    """One function makes one for each; they are held by their interval."""
    task = make_task(scheduler=lambda one: StepLR(one, 1), scheduler_interval="ep")

    schedulers = make_trainer(task).state.schedulers

    ((name, scheduler),) = schedulers["ep"]
    assert (name, list(schedulers)) == ("sgd", ["ep"])
    assert isinstance(scheduler, StepLR)


def test_hooks_alone_are_a_task(make_trainer, make_batches):
    """Whoever likes methods better than values; what isn't there is the core's."""

    class Hooks:
        @hookimpl
        def build_model(self, state):
            return nn.Linear(3, 3).to(state.device)

        @hookimpl
        def build_optimizers(self, state):
            return {"mine": SGD(state.model.parameters(), lr=0.1)}

        @hookimpl
        def build_train_dataloader(self):
            return make_batches()

        @hookimpl
        def loss(self, state):
            return cross_entropy(state.outputs, state.targets)

    trainer = make_trainer(Hooks())
    before = trainer.state.model.weight.clone()

    trainer.fit()

    assert not torch.equal(trainer.state.model.weight, before)
    assert trainer.owner("loss").role == "task"
    assert trainer.owner("forward").role == "core"


@pytest.mark.parametrize("task", [object(), nn.Linear(3, 3), "digits.py", None, lambda: 3])
def test_what_is_no_task_is_refused(task):
    """A model alone doesn't say what to train it for."""
    with pytest.raises(TypeError, match="a task is a Task, or an object or module"):
        Trainer(task)


def test_a_class_is_no_task():
    """Forgotten parentheses get a message of their own."""
    with pytest.raises(TypeError, match="was given the class Hooks, not an instance"):
        Trainer(type("Hooks", (), {}))


def test_metrics_may_be_given_by_eval_set(make_trainer, make_task, make_batches):
    """One that isn't named has the loss alone; one with none has nothing but what is logged."""
    accuracy = {"accuracy": Accuracy("multiclass", num_classes=3)}
    sets = dict.fromkeys(("a", "b", "c"), make_batches())
    metrics = {"a": accuracy, "c": {"ones": lambda outputs, targets: torch.ones(()), "loss": None}}

    results = make_trainer(make_task(eval_dataloaders=sets, metrics=metrics)).eval()

    assert {name: set(one) for name, one in results.items()} == {
        "a": {"accuracy", "loss"},
        "b": {"loss"},
        "c": {"ones"},
    }


def test_a_set_of_metrics_for_no_eval_set_is_refused(make_trainer, make_task, make_batches):
    """They would be missing without a word."""
    task = make_task(eval_dataloaders={"valid": make_batches()}, metrics={"vaild": {}})

    with pytest.raises(TaskError, match="name the eval set 'vaild'; the closest is 'valid'"):
        make_trainer(task)


@pytest.mark.parametrize(
    ("size", "what"), [(2, "microbatch_size is 2"), ("auto", "microbatch_size is auto")]
)
def test_a_loss_that_does_not_split_is_not_split(make_trainer, make_task, size, what):
    """Its mean over microbatches is another loss."""
    task = make_task(loss_splits=False)
    trainer = make_trainer(task, microbatch_size=size)

    with pytest.raises(TaskError, match=f"{what}, but the task's loss can't be split"):
        trainer.fit()
    make_trainer(task).fit()


def test_nor_are_batches_of_parts_trained_with_it(make_trainer, make_task, make_batches):
    """A batch of one part is a batch."""
    parts = [Microbatches([one]) for one in make_batches()]
    make_trainer(make_task(train_dataloader=parts, loss_splits=False)).fit()

    with pytest.raises(
        TaskError, match="the batch has 3 parts, but the task's loss can't be split"
    ):
        make_trainer(
            make_task(train_dataloader=[Microbatches(make_batches())], loss_splits=False)
        ).fit()
