"""What must be true before training."""

from __future__ import annotations

import pytest

from eventloop import Trainer
from eventloop.errors import EventloopError, PluginError, TaskError


@pytest.mark.parametrize("left", [None, 3])
def test_whoever_takes_the_model_away_is_named(left, make_trainer, make_plugin):
    """A forgotten return of a function that changes models leaves None."""
    thief = make_plugin("thief", init=lambda state: setattr(state, "model", left))

    with pytest.raises(PluginError, match=r"after init, state.model is [\s\S]*by +thief"):
        make_trainer(algorithms=[thief])


def test_an_eval_loader_that_is_empty_by_its_length_is_refused(make_trainer, make_task):
    """When the trainer is built, not after the first epoch."""
    task = make_task(eval_dataloaders={"test": []})

    with pytest.raises(TaskError, match="the eval data loader 'test' has no batch"):
        make_trainer(task)


def test_a_task_without_training_data_says_so(make_trainer, make_task):
    """It may be there to evaluate; to train is another thing."""
    trainer = make_trainer(make_task(train_dataloader=None))

    with pytest.raises(TaskError, match="the task has no train data loader"):
        trainer.fit()


@pytest.mark.parametrize("question", ["should_end_epoch", "should_rebuild_dataloader"])
def test_an_iterator_is_fine_where_a_plugin_may_end_or_renew_it(
    question, make_trainer, make_task, make_batches, make_plugin
):
    """An endless generator, say, that an algorithm divides into epochs."""
    task = make_task(train_dataloader=lambda: iter(make_batches(2)))
    trainer = make_trainer(
        task, algorithms=[make_plugin(**{question: lambda state: True})], max_duration="2ep"
    )
    trainer.fit()

    assert trainer.state.clock.epoch == 2


@pytest.mark.parametrize("method", ["fit", "eval", "predict", "export"])
def test_a_closed_trainer_is_closed(method, make_task, make_batches, clean):
    """Its plugins have closed their files."""
    task = make_task(eval_dataloaders=make_batches(1))
    with Trainer(task, device="cpu", autoload=False, max_duration="1ep") as trainer:
        pass
    arguments = {"predict": [make_batches(1)], "export": [clean / "m.safetensors"]}

    with pytest.raises(EventloopError, match="the trainer is closed"):
        getattr(trainer, method)(*arguments.get(method, []))


def test_an_owner_that_splits_into_nothing_is_named(make_trainer, make_plugin):
    """No microbatch is not a gradient, and a step all the same."""
    cutter = make_plugin("cutter", split_batch=lambda state: [])

    with pytest.raises(PluginError, match=r"split_batch returned no microbatch\n  by +cutter"):
        make_trainer(algorithms=[cutter]).fit()
