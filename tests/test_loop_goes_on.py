"""Going on: a run in several fits trains on the data of one, with the weights of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from eventloop.errors import TaskError


class Stream(IterableDataset):
    """Twelve samples, of which only iterating tells how many there are."""

    def __iter__(self):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
        return iter([(row, row.argmax()) for row in inputs])


def shuffled() -> DataLoader:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=4, shuffle=True)


def streamed() -> DataLoader:
    return DataLoader(Stream(), batch_size=4)


@pytest.fixture
def trained(make_trainer, make_task, make_plugin) -> Callable:
    """Trains two epochs in the given fits; gives the inputs seen and the weights."""

    def trained(*untils, make_loader=shuffled, **given):
        seen = []
        task = make_task(
            model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
            train_dataloader=make_loader,
            eval_dataloaders=make_loader,
        )
        watch = make_plugin(batch_start=lambda state: seen.append(state.inputs))
        trainer = make_trainer(task, callbacks=[watch], max_duration="2ep", **given)
        for until in untils:
            trainer.fit(until)
        return torch.stack(seen), trainer.state.model[0].weight

    return trained


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make_loader", [shuffled, streamed])
@pytest.mark.parametrize("untils", [["4ba", None], ["1ba", "2ba", "5ba", None], ["1ep", None],
                                    ["3ba", None], ["6ba"], ["20sp", "2ep"], ["0.5dur", None]])  # fmt: skip
def test_several_fits_train_as_one(untils, make_loader, trained):
    """The order of data, dropout and weights go on as if nobody had stopped."""
    expected_inputs, expected_weight = trained(None, make_loader=make_loader)

    inputs, weight = trained(*untils, make_loader=make_loader)

    torch.testing.assert_close(inputs, expected_inputs, rtol=0, atol=0)
    assert torch.equal(weight, expected_weight)


def test_another_seed_would_be_seen(trained):
    """Control: order, dropout and first weights come from the seed."""
    inputs, weight = trained(None)

    other_inputs, other_weight = trained(None, seed=1)

    assert not torch.equal(inputs, other_inputs)
    assert not torch.equal(weight, other_weight)


def test_a_requested_stop_goes_on_where_it_was(make_trainer, make_plugin):
    """`fit()` after a stop is how a person resumes in a notebook."""
    stopper = make_plugin(
        batch_end=lambda state: state.request_stop("look") if state.clock.batch == 2 else None
    )
    trainer = make_trainer(algorithms=[stopper], max_duration="2ep")

    trainer.fit()
    stopped_at = trainer.state.clock.moment()[:2]
    with pytest.warns(UserWarning, match="this fit.. continues it until 2ep"):
        trainer.fit()

    assert stopped_at == (0, 2)
    assert trainer.state.clock.moment()[:2] == (2, 6)
    assert trainer.state.stop_reason is None


def test_resumed_tells_whether_the_epoch_had_begun(make_trainer, make_plugin):
    """A plugin that prepares an epoch must not prepare it twice."""
    resumed = []
    watch = make_plugin(epoch_start=lambda state: resumed.append(state.resumed))
    trainer = make_trainer(callbacks=[watch], max_duration="2ep")

    trainer.fit(until="1ba")
    trainer.fit()

    assert resumed == [False, True, False]


def test_what_is_done_is_not_trained_again(make_trainer):
    """A fit of nothing is most likely a mistake, so it says so."""
    trainer = make_trainer()
    trainer.fit()
    before = trainer.state.model.weight.clone()

    with pytest.warns(UserWarning, match="nothing to train: 1ep is done"):
        trainer.fit()

    assert torch.equal(trainer.state.model.weight, before)


def test_an_infinite_loader_is_one_long_epoch(make_trainer, make_task, make_batches):
    """Streams of pretraining have no end; the duration has one."""
    task = make_task(train_dataloader=lambda: itertools.cycle(make_batches()))
    trainer = make_trainer(task, max_duration="7ba")

    trainer.fit()

    assert trainer.state.clock.moment()[:2] == (0, 7)


def test_a_batch_of_an_iterable_is_taken_after_what_the_batch_before_caused(
    make_trainer, make_task, make_batches, make_plugin
):
    """A curriculum that reads the state of training must see the state that is."""
    said = []

    class Curriculum:
        def __iter__(self):
            for idx, batch in enumerate(make_batches()):
                said.append(f"batch {idx}")
                yield batch

    watch = make_plugin(batch_end=lambda state: said.append("end"))

    make_trainer(make_task(train_dataloader=Curriculum()), callbacks=[watch]).fit()

    assert said == ["batch 0", "end", "batch 1", "end", "batch 2", "end"]


@pytest.mark.parametrize(
    ("duration", "message"),
    [("2ep", "used up after one epoch, but 2 are to come"), ("5ba", "yielded no batch in epoch 2")],
)
def test_an_iterator_that_is_used_up_is_refused(
    duration, message, make_trainer, make_task, make_batches
):
    """Its second epoch has no batch: epochs would pass, or never end, with nothing trained."""
    task = make_task(train_dataloader=lambda: iter(make_batches()))

    with pytest.raises(TaskError, match=message):
        make_trainer(task, max_duration=duration).fit()


@pytest.fixture
def interrupted(make_trainer, make_plugin):
    """A trainer whose fit was interrupted in the second of two microbatches."""
    signals = [KeyboardInterrupt]

    def interrupt(state):
        if signals and state.microbatch_idx == 1:
            raise signals.pop()

    trainer = make_trainer(
        algorithms=[make_plugin(before_loss=interrupt)], microbatch_size=2, max_duration="1ba"
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    return trainer


def test_a_prediction_after_an_interrupted_fit_is_of_its_own_batches(interrupted, make_batches):
    """A person who interrupts a notebook looks at the model next, not at half a batch."""
    batch = make_batches(1)[0]

    outputs = interrupted.predict([batch])

    inputs = batch[0].to(interrupted.state.device)
    assert torch.equal(outputs[0], interrupted.state.model(inputs).cpu())


def test_a_fit_after_an_interrupted_one_starts_without_its_gradients(interrupted, make_batches):
    """The batch is repeated, and half of it must not be part of its step."""
    model = nn.Linear(3, 3)
    model.load_state_dict(interrupted.state.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(*(part.split(2) for part in make_batches()[0])):
        (nn.functional.cross_entropy(model(inputs), targets) * 0.5).backward()
    optimizer.step()

    interrupted.fit()

    assert torch.equal(interrupted.state.model.weight.cpu(), model.weight)


def test_a_batch_that_fails_leaves_no_number_at_the_one_before(make_trainer, make_plugin):
    """A run that goes on from there would have a number in its log that no other run has."""
    rows = []

    def forward(state):
        state.log("made/batch", state.clock.batch + 1.0)
        if state.clock.batch == 2:
            raise ValueError("the third batch")

    heard = make_plugin("heard", log=lambda numbers, at: rows.append((at.batch, numbers)))
    trainer = make_trainer(algorithms=[make_plugin(before_forward=forward)], callbacks=[heard])

    with pytest.raises(ValueError, match="the third batch"):
        trainer.fit()

    assert [(batch, row["made/batch"]) for batch, row in rows] == [(1, 1.0), (2, 2.0)]


def test_a_resumed_run_does_not_save_the_batch_that_it_was_saved_at(
    make_trainer, make_plugin, tmp_path
):
    """A run that is started again and again would write its checkpoint each time."""
    saved = []
    watch = make_plugin(
        should_checkpoint=lambda state: True,
        checkpoint_saved=lambda state, path: saved.append(path.name),
    )
    for until in ("2ba", "3ba"):
        trainer = make_trainer(
            callbacks=[watch], run_dir=tmp_path / "run", checkpoint_interval=None
        )
        trainer.fit(until)
        trainer.close()
        saved.append(until)

    first, second = (names.split() for names in " ".join(saved).split("2ba"))
    assert len(set(first)) == len(first)
    assert not set(first) & set(second)


def test_an_evaluation_that_failed_is_made_up_for(
    make_trainer, make_task, make_batches, make_plugin
):
    """By the next fit, at the same batch."""
    failures, done = [OSError("network")], []

    def eval_start(state):
        if failures:
            raise failures.pop()

    watch = make_plugin(
        eval_start=eval_start, eval_after_all=lambda state: done.append(state.clock.batch)
    )
    trainer = make_trainer(
        make_task(eval_dataloaders=make_batches(1)),
        algorithms=[watch],
        max_duration="2ep",
        eval_interval="3ba",
    )
    with pytest.raises(OSError, match="network"):
        trainer.fit()

    trainer.fit()

    assert done == [3, 6]
