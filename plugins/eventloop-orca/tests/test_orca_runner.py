"""The runner: what callbacks read of the run, and change."""

import pytest
import torch

from eventloop import PluginError
from eventloop_orca import Callback, MainCallback, Orca
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

OF_ITERATION = ("batch", "batch_idx", "output", "outputs", "loss")


def fit(folder, *callbacks, task=None, **given):
    given = {"max_duration": "2ep"} | given
    orca = Orca(callbacks=list(callbacks))
    with isolated_trainer(folder, task, algorithms=[orca], **given) as trainer:
        trainer.fit()
    return trainer


class Notes(Callback):
    """Keeps what it sees."""

    def __init__(self):
        self.there, self.counts, self.seen = {}, [], {}

    def note(self, point, runner):
        self.there.setdefault(point, {name for name in OF_ITERATION if hasattr(runner, name)})

    def before_run(self, runner):
        self.note("before_run", runner)
        self.seen |= {name: getattr(runner, name) for name in ("num_epochs", "rank", "stop")}

    def before_train_iter(self, runner):
        self.note("before_train_iter", runner)
        self.counts.append((runner.epochs, runner.batch_idx, runner.global_step))
        assert runner.epoch == runner.epochs + 1  # as the document counts

    def after_train_iter(self, runner):
        self.note("after_train_iter", runner)
        self.seen["loss"], self.seen["output"] = runner.loss.detach(), runner.outputs
        self.seen["objects"] = (
            runner.model, runner.optimizer, runner.criterion, runner.train_loader
        )  # fmt: skip

    def after_val_iter(self, runner):
        self.note("after_val_iter", runner)
        self.seen["val epochs"] = runner.epochs

    def after_train_epoch(self, runner):
        self.note("after_train_epoch", runner)
        self.seen["epochs"] = runner.epochs


@pytest.fixture(scope="module", params=[None, MainCallback])
def noted(request, tmp_path_factory):
    """A run with a main callback, and one without."""
    notes = Notes()
    mains = [] if request.param is None else [request.param()]
    return notes, fit(tmp_path_factory.mktemp("noted"), notes, *mains)


def test_attributes_of_an_iteration_are_deleted_after_it(noted):
    """What the last one left must not be taken for this one's."""
    notes, _ = noted

    assert notes.there["before_run"] == notes.there["after_train_epoch"] == set()
    assert notes.there["before_train_iter"] == {"batch", "batch_idx"}
    assert notes.there["after_train_iter"] == set(OF_ITERATION)
    # Without a main callback nobody computes a loss in a validation.
    assert notes.there["after_val_iter"] >= {"batch", "batch_idx", "output", "outputs"}


def test_counts_are_those_of_orca(noted):
    """An epoch counts as done after its validation, a step after its iteration."""
    notes, _ = noted

    assert notes.counts == [(step // 3, step % 3, step) for step in range(6)]
    assert notes.seen["val epochs"] == 1
    assert notes.seen["epochs"] == 2


def test_the_attributes_are_those_of_the_run(noted):
    """No copies: a callback that changes the learning rate changes the run's."""
    notes, trainer = noted
    state = trainer.state
    optimizer = state.optimizers["sgd"]
    expected = (state.model, optimizer, state.criterion, state.train_dataloader)

    assert all(one is other for one, other in zip(notes.seen["objects"], expected, strict=True))
    assert (notes.seen["num_epochs"], notes.seen["rank"], notes.seen["stop"]) == (2, 0, False)
    assert notes.seen["loss"].shape == ()
    assert notes.seen["output"].shape == (4, 3)


@pytest.mark.parametrize(("num_epochs", "batches"), [(1, 3), (3, 9)])
def test_before_run_may_change_the_number_of_epochs(num_epochs, batches, tmp_path):
    """To less and to more."""

    class Sets(Callback):
        def before_run(self, runner):
            runner.num_epochs = num_epochs

    assert fit(tmp_path, Sets()).state.clock.batch == batches


@pytest.mark.parametrize(
    ("point", "num_epochs", "says"),
    [
        ("before_epoch", 3, "outside of before_run"),
        ("before_run", 0, "is not a number of epochs"),
        ("before_run", 1.5, "is not a number of epochs"),
    ],
)
def test_a_wrong_number_of_epochs_is_refused(point, num_epochs, says, tmp_path):
    """Later it would have no effect in Orca."""

    def assign(self, runner):
        runner.num_epochs = num_epochs

    with pytest.raises(PluginError, match=says):
        fit(tmp_path, type("Sets", (Callback,), {point: assign})())


@pytest.mark.parametrize(
    ("point", "batches"), [("after_train_iter", 2), ("after_epoch", 3), ("before_train_epoch", 1)]
)
def test_stop_ends_the_run(point, batches, tmp_path):
    """After the iteration, or the epoch, in which it was set."""

    def stop(self, runner):
        if point != "after_train_iter" or runner.global_step == 1:
            runner.stop = True

    trainer = fit(tmp_path, type("Stops", (Callback,), {point: stop})())

    assert trainer.state.clock.batch == batches
    assert "runner.stop" in trainer.state.stop_reason


def test_callbacks_share_a_store(tmp_path):
    """One puts what another gets; a key that isn't there is an error that says so."""
    seen = []

    class Puts(Callback):
        def before_run(self, runner):
            runner.put("best", 1)
            with pytest.raises(KeyError, match="already"):
                runner.put("best", 2)

        def after_run(self, runner):
            runner.remove("best")
            for wrong in (runner.get, runner.remove, lambda key: runner.update(key, 1)):
                with pytest.raises(KeyError, match="no item is named 'best'"):
                    wrong("best")

    class Gets(Callback):
        def after_train_iter(self, runner):
            runner.update("best", runner.get("best") + 1)
            seen.append(runner.get("best"))

    fit(tmp_path, Puts(), Gets(), max_duration="1ep")

    assert seen == [2, 3, 4]


def test_several_inputs_stand_one_after_the_other_in_a_batch(tmp_path):
    """As Orca flattens them; what a callback assigns has the same form."""
    (x, y), *_ = tiny_batches(1)
    batches = [([x, x], y)]
    seen = []

    class Doubles(MainCallback):
        def before_train_iter(self, runner):
            one, other, target = runner.batch
            runner.batch = one, 2 * other, target

        def on_train_forward(self, runner):
            seen.append([tensor.cpu().clone() for tensor in runner.batch])
            super().on_train_forward(runner)

    class Sums(torch.nn.Linear):
        def forward(self, one, other):
            return super().forward(one + other)

    task = tiny_task(model=lambda: Sums(3, 3), train_dataloader=batches, eval_dataloaders=None)
    fit(tmp_path, Doubles(), task=task, max_duration="1ep")

    torch.testing.assert_close(seen, [[x, 2 * x, y]], rtol=0, atol=0)


def test_a_prediction_sees_inputs_alone(tmp_path):
    """And what a callback leaves as the output is returned."""
    (x, y), *_ = tiny_batches(1)

    class Predicts(Callback):
        def before_pred_iter(self, runner):
            (inputs,) = runner.batch
            runner.batch = (0 * inputs,)

        def after_pred_iter(self, runner):
            runner.output = runner.output.argmax(1)

    orca = Orca(callbacks=[Predicts()])
    with isolated_trainer(tmp_path, algorithms=[orca]) as trainer:
        (predicted,) = trainer.predict([(x, y)])
        expected = trainer.state.model.cpu()(0 * x).argmax(1)

    assert torch.equal(predicted.cpu(), expected)


def test_ranks_that_disagree_on_the_end_are_told(tmp_path):
    """One would wait for the others for ever."""

    class Sets(Callback):
        def before_run(self, runner):
            runner.num_epochs = 1 + runner.rank

    def message():
        with pytest.raises(PluginError) as raised:
            fit(tmp_path, Sets())
        return str(raised.value)

    assert all("another end of the run on each rank: 1ep, 2ep" in one for one in run_ranks(message))
