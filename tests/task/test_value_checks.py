"""Values of a task that don't fit: refused where they are written, with the line to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from eventloop.errors import TaskError


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()


class Listed(nn.Module):
    """Its layer isn't registered."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 3)]


SOME = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 1}, "takes an nn.Module or a function that returns one, not 1"),
        ({"model": Wide}, r"requires width: write model=lambda: Wide\(width=...\)"),
        ({"loss": nn.CrossEntropyLoss}, r"is a class.*write loss=CrossEntropyLoss\(\)"),
        ({"optimizer": SGD}, r"optimizer=SGD\) is a class.*write optimizer=lambda model: SGD"),
        (
            {"optimizer": Adam},
            r"write optimizer=lambda model: Adam\(model.parameters\(\), lr=0.001\)",
        ),
        ({"optimizer": SOME}, "takes a function of the model.*not a SGD: write optimizer=lambda"),
        ({"optimizer": [SOME]}, "takes a function, not a list: optimizer=lambda model"),
        ({"scheduler": StepLR}, r"scheduler=StepLR\) is a class.*write scheduler=lambda optimizer"),
        ({"scheduler": StepLR}, r"lambda optimizer: StepLR\(optimizer, step_size=...\)"),
        ({"scheduler": StepLR(SOME, 1)}, "takes a function of the optimizer.*not a StepLR"),
        ({"scheduler": {"sgd": 3}}, r"scheduler=...\) takes a function, not 3"),
        ({"scheduler_interval": "ep"}, "scheduler_interval='ep' has no effect without a scheduler"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_at_once(given, message, make_task):
    """Where it was written."""
    with pytest.raises((TypeError, ValueError), match=message):
        make_task(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": lambda model: None}, "the task's optimizer function returned None"),
        ({"optimizer": lambda model: [SOME]}, r"a list of 1, without names\n  fix  name them"),
        (
            {"optimizer": lambda model: ([SOME], [StepLR(SOME, 1)])},
            r"schedulers are Task\(scheduler=",
        ),
        (
            {"model": Listed},
            r"the model, a Listed, has none\n  fix  make its layers attributes[\s\S]*ModuleList",
        ),
        ({"optimizer": lambda model: SGD([], lr=0.1)}, "although the model, a Linear, has some"),
        ({"scheduler": lambda one: None}, "the task's scheduler of 'sgd' is None, not a torch"),
        (
            {"scheduler": ReduceLROnPlateau},
            r"ReduceLROnPlateau.step requires metrics[\s\S]*schedules.plateau[\s\S]*eval_after_all",
        ),
        ({"eval_dataloaders": [DataLoader([1])]}, r"a list of 1, without names\n  fix  name them"),
    ],
)
def test_what_a_function_gives_is_refused_when_the_trainer_is_built(
    given, message, make_trainer, make_task
):
    """With what it was, and what to write."""
    with pytest.raises(TaskError, match=message):
        make_trainer(make_task(**given))


def test_a_class_that_needs_the_optimizer_alone_is_a_scheduler(make_trainer, make_task):
    """It is a function of the optimizer like any other."""
    trainer = make_trainer(make_task(scheduler=ConstantLR))

    ((_, scheduler),) = trainer.state.schedulers["ba"]
    assert isinstance(scheduler, ConstantLR)


def returns_nothing(outputs, targets):
    cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss": returns_nothing},
            r"loss returned None\n  function  returns_nothing, .*value_checks.py:",
        ),
        (
            {"loss": lambda o, t: cross_entropy(o, t).item()},
            "a float, which has no[\\s\\S]*a tensor",
        ),
        ({"loss": lambda o, t: cross_entropy(o.detach(), t)}, "it has no gradient"),
        ({"num_tokens": lambda: 1.5}, "num_tokens returned 1.5, a float, not an int"),
        ({"num_tokens": lambda: True}, "num_tokens returned True, a bool, not an int"),
        ({"num_tokens": lambda: torch.tensor(3)}, r"returned tensor\(3\), a Tensor, not an int"),
        ({"loss_weight": lambda: 0}, r"weights of 2 microbatches have no mean: \[0, 0\]"),
        ({"loss_weight": lambda: "1"}, r"weights of 2 microbatches have no mean: \['1', '1'\]"),
        ({"train_dataloader": [(torch.zeros(0, 3), torch.zeros(0))]}, "has no samples"),
        ({"train_dataloader": [(torch.zeros(4, 3),) * 3]}, r"{'loss': \.\.\., 'logits': \.\.\.}"),
    ],
)
def test_what_is_found_in_the_first_step_says_what_to_do(given, message, make_trainer, make_task):
    """What can't be known before."""
    trainer = make_trainer(make_task(**given), microbatch_size=2)

    with pytest.raises(TaskError, match=message):
        trainer.fit()


def fail(*_):
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"loss": lambda outputs, targets: fail()}, "loss, epoch 1, batch 1"),
        ({"forward": lambda batch: fail()}, "forward, epoch 1, batch 1"),
        ({"num_tokens": lambda batch: fail()}, "count_batch, epoch 1, batch 1"),
    ],
)
def test_what_the_task_raises_is_placed(given, where, make_trainer, make_task, make_plugin):
    """A wrapper through which it passes is innocent."""
    wrapper = make_plugin("wrapper", batch_start=lambda state: None)

    with pytest.raises(KeyError, match="mine") as caught:
        make_trainer(make_task(**given), algorithms=[wrapper]).fit()

    assert caught.value.__notes__[-1] == f"in the task's {where}"


def test_a_key_that_the_model_does_not_take_is_explained(make_trainer, make_task):
    """The rule that a mapping becomes keywords is ours, so that the message must name it."""
    batch = {"input": torch.zeros(4, 3), "labels": torch.zeros(4), "idx": torch.zeros(4)}
    trainer = make_trainer(make_task(train_dataloader=[batch]))

    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        trainer.fit()

    assert (
        "model(**batch), here with input, idx; forward takes input\n" in caught.value.__notes__[0]
    )
    assert "forward=lambda model, batch: model(batch['input'])" in caught.value.__notes__[0]


def test_the_key_that_the_model_takes_is_the_one_to_forward(make_trainer, make_task):
    """The first of the batch may be its targets."""
    batch = {"y": torch.zeros(4), "input": torch.zeros(4, 3)}
    trainer = make_trainer(make_task(train_dataloader=[batch]))

    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        trainer.fit()

    assert "the targets as 'labels'" in caught.value.__notes__[0]
    assert "forward=lambda model, batch: model(batch['input'])" in caught.value.__notes__[0]


def test_what_a_model_raises_itself_is_not_explained(make_trainer, make_task):
    """A TypeError from inside of it is its own affair."""

    class Broken(nn.Linear):
        def forward(self, inputs, labels):
            return len(3)

    batch = {"inputs": torch.zeros(4, 3), "labels": torch.zeros(4)}

    with pytest.raises(TypeError, match="has no len") as caught:
        make_trainer(make_task(model=Broken(3, 3), train_dataloader=[batch])).fit()

    (note,) = caught.value.__notes__
    assert note.startswith("forward was given a batch of {'inputs': float32 (4, 3)")


def test_the_loss_is_evaluated_where_no_metric_is_given(make_trainer, make_task, make_batches):
    """Its mean over the samples, whatever the size of the last batch."""
    batches = [*make_batches(2), tuple(part[:1] for part in make_batches(1)[0])]
    trainer = make_trainer(make_task(eval_dataloaders={"test": batches}))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    found = trainer.eval()

    device = trainer.state.device
    expected = cross_entropy(trainer.state.model(inputs.to(device)), targets.to(device)).detach()
    torch.testing.assert_close(found, {"test": {"loss": expected}}, check_dtype=False)


def test_an_empty_mapping_of_metrics_means_none(make_trainer, make_task, make_batches):
    """For data without targets, say."""
    trainer = make_trainer(make_task(eval_dataloaders=make_batches(1), metrics={}))

    assert trainer.eval() == {"eval": {}}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x]])
@pytest.mark.parametrize("forward", [None, lambda model, inputs: model(inputs)])
def test_unlabelled_data_can_be_predicted_for(wrap, forward, make_trainer, make_task, make_batches):
    """A tensor, or what a TensorDataset of one tensor gives."""
    trainer = make_trainer(make_task(forward=forward))
    inputs = make_batches(1)[0][0]

    (outputs,) = trainer.predict([wrap(inputs)])

    expected = trainer.state.model(inputs.to(trainer.state.device)).detach().cpu()
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("given", [None, 3, torch.zeros(4, 3)])
def test_predict_takes_a_data_loader(given, make_trainer):
    """A tensor would be taken apart into samples."""
    with pytest.raises(TaskError, match=r"predict takes a data loader, not [\s\S]*\[batch\]"):
        make_trainer().predict(given)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (
            (nn.Linear(3, 3),),
            {},
            r"not a Linear; model and data belong to the task: Trainer\(Task\(model=",
        ),
        ((nn.Linear(3, 3), [1]), {}, "not a Linear"),
        ((None, [1]), {}, "not a list"),
        (("1ep", "2ep"), {}, "takes one argument"),
        (
            (),
            {"ckpt_path": "last"},
            r"no argument 'ckpt_path'; here it is a setting: Trainer\(task, resume=",
        ),
        ((), {"epochs": 3}, r"'epochs'; here it is a setting: Trainer\(task, max_duration="),
        ((), {"train_dataloader": [1]}, r"belongs to the task: Trainer\(Task\(train_dataloader="),
        ((), {"untill": "1ep"}, "'untill'; the closest is 'until'"),
    ],
)
def test_what_other_trainers_are_given_to_fit_is_named(arguments, keywords, message, make_trainer):
    """`trainer.fit(model, loader)` is the first line of who comes from Lightning."""
    trainer = make_trainer()

    with pytest.raises(TypeError, match=message):
        trainer.fit(*arguments, **keywords)

    assert trainer.fit("1ep").history
