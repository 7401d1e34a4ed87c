"""Garbage collection: at which batches, and that Python's own is put back."""

from __future__ import annotations

import gc
import weakref

import pytest

from eventloop.clock import Time
from eventloop.config.settings import Settings
from eventloop.errors import SettingError
from eventloop.training.performance_settings import GarbageCollection


class Cycle:
    """Garbage that reference counts alone never free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections():
    """The collections, each as what `at` said then; Python starts none by itself."""
    found, at = [], [lambda: None]

    def note(phase, info):
        if phase == "start":
            found.append(at[0]())

    gc.collect()
    gc.callbacks.append(note)
    yield found, at
    gc.callbacks.remove(note)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_objects", [0, 5000])
@pytest.mark.parametrize(
    ("interval", "batches"), [("3ba", [3, 6, 9]), ("2ep", [6]), ("0.5dur", [5]), (None, [])]
)
def test_it_collects_at_the_same_batches_whatever_is_allocated(
    num_objects, interval, batches, collections, make_trainer, make_plugin
):
    """A rank that stops at another batch keeps all others waiting."""
    found, at = collections
    kept = []
    busy = make_plugin(
        "busy", batch_start=lambda state: kept.extend([] for _ in range(num_objects))
    )
    trainer = make_trainer(algorithms=[busy], gc_interval=interval, max_duration="10ba")
    at[0] = lambda: trainer.state.clock.batch
    found.clear()
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)  # what Python does before the first multiple isn't the subject

    trainer.fit()

    gc.set_threshold(*thresholds)
    assert found == batches


def test_after_the_first_multiple_python_collects_nothing_by_itself(make_trainer, make_plugin):
    """In between it would be at a moment of its own."""
    states = []
    watch = make_plugin("watch", batch_start=lambda state: states.append(gc.isenabled()))

    make_trainer(callbacks=[watch], gc_interval="2ba", max_duration="4ba").fit()

    assert states == [True, True, False, False]
    assert gc.isenabled()


def test_cyclic_garbage_is_freed_at_the_interval(make_trainer, make_plugin):
    """What a batch leaves in a cycle must not pile up."""
    cycles, alive = [], []

    def leave(state):
        cycles.append(weakref.ref(Cycle()))

    def count(state):
        alive.append(sum(one() is not None for one in cycles))

    plugins = [make_plugin("leave", batch_start=leave), make_plugin("z", batch_end=count)]
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)

    make_trainer(algorithms=plugins, gc_interval="3ba", max_duration="7ba").fit()

    gc.set_threshold(*thresholds)
    assert alive == [1, 2, 3, 1, 2, 3, 1]


def test_old_garbage_is_freed_at_the_tenth_multiple(make_trainer, make_plugin, monkeypatch):
    """A look at everything takes as long as many steps: too long for a short run, too useful to miss."""
    monkeypatch.setattr(GarbageCollection, "has_looked_at_all", False)
    old, alive = Cycle(), []
    gone = weakref.ref(old)
    gc.collect()  # by now Python takes it for one that stays
    del old
    watch = make_plugin("watch", batch_end=lambda state: alive.append(gone() is not None))
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)

    make_trainer(callbacks=[watch], gc_interval="1ba", max_duration="12ba").fit()

    gc.set_threshold(*thresholds)
    assert alive == [True] * 10 + [False] * 2


def looks(trainer) -> int:
    """Returns how often all objects were unfrozen, and so looked at, in a fit."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        unfreeze = gc.unfreeze
        patch.setattr(gc, "unfreeze", lambda: (calls.append(1), unfreeze()))
        trainer.fit()
    return len(calls)


def test_a_process_looks_at_everything_once(make_trainer, monkeypatch):
    """The second fit of a notebook, and each trial of a study, would pay for imports again."""
    monkeypatch.setattr(GarbageCollection, "has_looked_at_all", False)
    settings = {"gc_interval": "1ba", "max_duration": "12ba"}

    with make_trainer(**settings) as trainer:
        first = looks(trainer)
    with make_trainer(**settings) as trainer:
        second = looks(trainer)

    assert (first, second) == (1, 0)


def test_what_a_command_has_frozen_is_never_looked_at(make_trainer, monkeypatch):
    """It freezes what imports have made, before anything of the run is built."""
    monkeypatch.setattr(GarbageCollection, "has_looked_at_all", False)
    gc.freeze()
    try:
        with make_trainer(gc_interval="1ba", max_duration="12ba") as trainer:
            assert looks(trainer) == 0
    finally:
        gc.unfreeze()

    assert not GarbageCollection.has_looked_at_all


def test_garbage_of_the_run_is_freed_where_nothing_else_is_looked_at(make_trainer, make_plugin):
    """Also what lived over many multiples, as an iterator of an epoch does."""
    cycles, alive = [], []

    def hold(state):
        if state.clock.batch == 5:
            cycles.append(Cycle())
            alive.append(weakref.ref(cycles[0]))
        if state.clock.batch == 11:
            cycles.clear()

    watch = make_plugin("watch", batch_start=hold)
    gone = []
    told = make_plugin("z", batch_end=lambda state: gone.append(bool(alive) and alive[0]() is None))
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)
    try:
        make_trainer(callbacks=[watch, told], gc_interval="1ba", max_duration="13ba").fit()
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

    assert gone == [False] * 12 + [True]


def test_what_lives_is_frozen_until_the_trainer_is_closed(make_trainer):
    """Collections look at what came since, in the next fit too."""
    assert gc.get_freeze_count() == 0
    trainer = make_trainer(gc_interval="2ba", max_duration="3ba")

    trainer.fit()
    frozen = gc.get_freeze_count()
    trainer.fit(until="8ba")

    assert frozen > 10_000
    assert gc.get_freeze_count() <= frozen  # what died since
    trainer.close()
    assert gc.get_freeze_count() == 0


def test_a_failure_puts_python_back(make_trainer, make_plugin):
    """The process may go on without the trainer."""

    def divide(state):
        1 // (3 - state.clock.batch)

    failing = make_plugin("failing", batch_end=divide)
    trainer = make_trainer(algorithms=[failing], gc_interval="1ba", max_duration="9ba")

    with pytest.raises(ZeroDivisionError):
        trainer.fit()

    assert gc.isenabled()
    trainer.close()
    assert gc.get_freeze_count() == 0


def test_who_switched_python_off_finds_it_off(make_trainer):
    """It is put back as it was, not as it usually is."""
    gc.disable()
    try:
        make_trainer(gc_interval="1ba").fit()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_seconds_are_refused():
    """They pass at other batches on each rank."""
    with pytest.raises(SettingError, match=r"gc_interval: 60\.0sec passes at a different batch"):
        Settings(gc_interval=Time("60sec"))


def test_a_fraction_of_an_unknown_length_is_refused(make_trainer, make_task):
    """When the trainer is built."""
    endless = iter(lambda: 0, 1)
    with pytest.raises(SettingError, match="gc_interval: "):
        make_trainer(make_task(train_dataloader=endless), gc_interval="0.5ep", max_duration="9ba")
