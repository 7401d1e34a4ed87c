"""What a callback sees of the State: all that its protocol declares, and nothing that it could change."""

from __future__ import annotations

import pytest
import torch

from eventloop import State, StateView, vocabulary
from eventloop.errors import ReadOnlyStateError
from eventloop.view import view_of


@pytest.fixture
def state(make_trainer) -> State:
    return make_trainer().state


@pytest.fixture
def view(state) -> StateView:
    return view_of(state, "watch (watch 1.0), batch_end")


WRITABLE = sorted(name for name in State.__slots__ if not name.startswith("_"))


@pytest.mark.parametrize("name", [*WRITABLE, "inputs", "targets", "rank"])
def test_a_view_refuses_to_assign_and_to_delete(name, view):
    """The message names plugin, hook and attribute, and the way to become an algorithm."""
    with pytest.raises(ReadOnlyStateError) as assigned:
        setattr(view, name, None)
    with pytest.raises(ReadOnlyStateError) as deleted:
        delattr(view, name)

    for caught, verb in ((assigned, "assigned"), (deleted, "deleted")):
        assert f"a callback {verb} state.{name}, but it may only read" in str(caught.value)
        assert "watch (watch 1.0), batch_end" in str(caught.value)
        assert "algorithms" in str(caught.value)


SHOWN = sorted({*WRITABLE} & {*vars(StateView)})


@pytest.mark.parametrize("name", [*SHOWN, "inputs", "targets", "rank", "world_size"])
def test_a_view_shows_what_its_protocol_declares(name, state, view):
    """Mappings as they are, but not to be written."""
    shown, real = getattr(view, name), getattr(state, name)

    assert shown is real or shown == real


@pytest.mark.parametrize("name", ["optimizers", "eval_metrics", "train_metrics", "metrics"])
def test_a_view_shows_mappings_that_can_not_be_written(name, view):
    """An entry more would change the training as an assignment does."""
    with pytest.raises(ReadOnlyStateError, match=rf"assigned state\.{name}\['more'\]"):
        getattr(view, name)["more"] = None
    with pytest.raises(ReadOnlyStateError, match=rf"deleted state\.{name}\['more'\]"):
        del getattr(view, name)["more"]


def test_nested_mappings_of_a_view_can_not_be_written_either(state, view):
    """They are read as they are now, and the refusal says how they were reached."""
    state.eval_metrics["test"] = {"accuracy": torch.ones(())}

    with pytest.raises(ReadOnlyStateError, match=r"state\.eval_metrics\['test'\]\['x'\]"):
        view.eval_metrics["test"]["x"] = 3

    assert view.eval_metrics["test"] == state.eval_metrics["test"]
    assert repr(view.eval_metrics) == repr(state.eval_metrics)


HIDDEN = sorted({*dir(State), "nothing"} - {*dir(object), *vars(StateView)})


@pytest.mark.parametrize("name", [name for name in HIDDEN if not name.startswith("__")])
def test_a_view_shows_nothing_that_its_protocol_lacks(name, view):
    """Drawing a number moves a generator, running again trains; so might what the State gets later."""
    with pytest.raises(ReadOnlyStateError, match=rf"state\.{name} isn't available to a callback"):
        getattr(view, name)


def test_a_callback_that_assigns_is_blamed(make_trainer, make_plugin):
    """In a real run, by its name and hook."""
    writer = make_plugin("writer", batch_end=lambda state: setattr(state, "loss", None))

    with pytest.raises(ReadOnlyStateError, match=r"assigned state\.loss") as caught:
        make_trainer(callbacks=[writer]).fit()

    assert "writer (Trainer(callbacks=...)), batch_end" in str(caught.value)
    assert "raised by plugin writer" in "".join(caught.value.__notes__)


def test_a_callback_may_log_and_ask(make_trainer, make_plugin):
    """Methods on the view too: log, request_stop, request_checkpoint, plugin."""
    heard = []

    def speak(state):
        state.log("watch/batch", state.clock.batch)
        state.request_stop("enough")
        assert state.plugin("watch").name == "watch"

    watch = make_plugin("watch", batch_end=speak, log=lambda numbers: heard.append(numbers))
    trainer = make_trainer(callbacks=[watch])
    trainer.fit()

    assert heard[0]["watch/batch"] == 1
    assert trainer.state.stop_reason == "enough"


@pytest.mark.parametrize(("name", "here"), vocabulary.STATE.items())
def test_another_trainers_attribute_is_written_otherwise_and_needs_no_algorithm(name, here, view):
    """Reading `global_step` changes nothing, so becoming an algorithm is no advice."""
    with pytest.raises(ReadOnlyStateError) as caught:
        getattr(view, name)

    assert caught.value.fix == f"write `{here}`"
    assert "algorithm" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lossy", "write `state.loss`, or store"),
        ("zzz", "store a value of the plugin on `self`; `StateView` lists"),
    ],
)
def test_an_attribute_that_no_state_has_needs_no_algorithm_either(name, fix, view):
    """An algorithm doesn't have it either."""
    with pytest.raises(ReadOnlyStateError) as caught:
        getattr(view, name)

    assert caught.value.fix.startswith(fix)


def test_a_value_of_the_plugins_own_is_kept_on_the_plugin(view):
    """The State takes no new attributes, from algorithms neither."""
    with pytest.raises(ReadOnlyStateError) as caught:
        view.best_loss = 0.5

    assert "a callback assigned state.best_loss, but it may only read" in str(caught.value)
    assert caught.value.fix == "store it on the plugin: `self.best_loss = ...`"


def test_what_algorithms_alone_have_is_for_an_algorithm(view):
    """`state.update` changes the training."""
    with pytest.raises(ReadOnlyStateError, match="update isn't available to a callback") as caught:
        view.update

    assert "is an algorithm" in caught.value.fix
