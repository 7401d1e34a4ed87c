"""At which points callbacks are called, in which order, and by which of their names."""

import pytest

from eventloop import PluginError
from eventloop_orca import Callback, MainCallback, Orca
from eventloop_orca.points import OF_MAIN, POINTS
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task

ALL = [name for name in vars(MainCallback) | vars(Callback) if not name.startswith("_")]
DOCUMENTED = [*OF_MAIN, *POINTS, "before_epoch", "after_epoch", "before_iter", "after_iter"]
SECOND = [name for name in ALL if name not in DOCUMENTED]


def recording(base, names, seen=None, tag=""):
    """Makes a callback that notes each call of these methods, and does what its base does."""
    seen = [] if seen is None else seen

    def method(name):
        def record(self, runner):
            seen.append(f"{tag}{name}")
            getattr(super(kind, self), name, lambda runner: None)(runner)

        return record

    kind = type("Recording", (base,), {name: method(name) for name in names})
    callback = kind()
    callback.seen = seen
    return callback


def fit(folder, *callbacks, predict=False, **given):
    """Trains 2 epochs of 2 batches, each with an evaluation of one batch."""
    given = {"max_duration": "2ep"} | given
    task = tiny_task(train_dataloader=tiny_batches(2), eval_dataloaders={"test": tiny_batches(1)})
    orca = Orca(callbacks=list(callbacks))
    with isolated_trainer(folder, task, algorithms=[orca], **given) as trainer:
        trainer.fit()
        if predict:
            trainer.predict(tiny_batches(1))
    return trainer


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    callback = recording(MainCallback, DOCUMENTED)
    fit(tmp_path_factory.mktemp("points"), callback, predict=True)
    return callback.seen


ITER = ["before_train_iter", "before_iter", "on_train_forward", "on_iter_forward",
        "on_iter_backward", "after_train_iter", "after_iter"]  # fmt: skip
VAL = ["before_val_epoch", "before_epoch", "before_val_iter", "before_iter", "on_val_forward",
       "on_iter_forward", "after_val_iter", "after_iter", "after_val_epoch",
       "after_epoch"]  # fmt: skip
EPOCH = ["before_train_epoch", "before_epoch", *ITER, *ITER, "on_lr_adjust", *VAL,
         "after_train_epoch", "after_epoch"]  # fmt: skip
PRED = ["before_pred_epoch", "before_epoch", "before_pred_iter", "before_iter", "on_pred_forward",
        "after_pred_iter", "after_iter", "after_pred_epoch", "after_epoch"]  # fmt: skip


def test_a_main_callback_sees_its_24_points_in_order(seen):
    """As in Orca's code: rates after the batches, validation after them, and the epoch's end last."""
    assert seen == ["before_run", *EPOCH, *EPOCH, "after_run", *PRED]
    assert len(set(seen)) == len(DOCUMENTED) == 24


def test_the_second_naming_is_called_where_the_first_is(tmp_path):
    """Begin for before, end for after, with or without a class of this package."""
    seen = []
    with_base = recording(Callback, SECOND, seen, "a ")
    without = recording(object, SECOND, seen, "b ")

    fit(tmp_path, with_base, without, max_duration="1ep")

    iteration = ["on_iter_begin", "on_iter_end"]
    whole = ["on_epoch_begin", *iteration, *iteration, "on_epoch_begin", *iteration, "on_epoch_end",
             "on_epoch_end"]  # fmt: skip
    assert seen == [
        f"{tag} {name}" for name in ("on_run_begin", *whole, "on_run_end") for tag in "ab"
    ]


def test_a_main_callback_comes_first_and_the_others_in_their_order(tmp_path):
    """As Orca puts it."""
    seen = []
    one, other = (recording(Callback, ["after_run"], seen, tag) for tag in ("one ", "other "))
    main = recording(MainCallback, ["after_run"], seen, "main ")

    fit(tmp_path, one, other, main, max_duration="1ba", eval_interval=None)

    assert seen == ["main after_run", "one after_run", "other after_run"]


def test_a_class_without_a_base_is_a_main_callback_by_its_methods(tmp_path):
    """What it leaves out is done as by default."""
    main = recording(object, ["on_lr_adjust", "before_iter"])

    trainer = fit(tmp_path, main, max_duration="1ep", eval_interval=None)

    assert main.seen == ["before_iter", "before_iter", "on_lr_adjust"]
    assert trainer.state.clock.batch == 2


def test_two_main_callbacks_are_refused():
    """Each would make a step."""
    with pytest.raises(PluginError, match=r"2 callbacks are main callbacks, MainCallback and"):
        Orca(callbacks=[MainCallback(), Callback(), recording(MainCallback, [])])


def test_an_object_without_points_is_refused():
    """It would never be called."""
    with pytest.raises(PluginError, match=r"has no method of any point"):
        Orca(callbacks=[object()])


def test_a_misspelt_point_is_told():
    """Beside one that is right, it would never be called, and nobody would know."""

    class Typo(Callback):
        def before_trian_iter(self, runner): ...

    says = "callback Typo: 'before_trian_iter' is not a point; the closest is 'before_train_iter'"
    with pytest.warns(UserWarning, match=says):
        Orca(callbacks=[Typo()])


def test_each_eval_data_loader_is_a_validation(tmp_path):
    """Orca has one; the runner says which of several it is."""
    loaders = {"valid": tiny_batches(1), "test": tiny_batches(1)}
    seen = []

    class Watch(Callback):
        def before_val_epoch(self, runner):
            seen.append(runner.val_loader)

    task = tiny_task(eval_dataloaders=loaders)
    with isolated_trainer(tmp_path, task, algorithms=[Orca(callbacks=[Watch()])]) as trainer:
        trainer.eval()

    assert [one is loader for one, loader in zip(seen, loaders.values(), strict=True)] == [True] * 2
