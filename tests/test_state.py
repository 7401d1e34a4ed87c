"""The State, and what a callback sees of it."""

from __future__ import annotations

import pytest
import torch

from eventloop import State, StateView
from eventloop.distributed.processes import Processes
from eventloop.errors import PluginError, ReadOnlyStateError
from eventloop.view import view_of


@pytest.fixture
def state(make_trainer) -> State:
    return make_trainer().state


@pytest.fixture
def view(state) -> StateView:
    return view_of(state, "watch (watch 1.0), batch_end")


WRITABLE = sorted(name for name in State.__slots__ if not name.startswith("_"))


@pytest.mark.parametrize("name", [*WRITABLE, "inputs", "targets", "rank", "new"])
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


@pytest.mark.parametrize("name", ["epoch", "batch", "sample", "token", "seconds", "previous"])
def test_the_loop_alone_moves_the_clock(name, state, view):
    """A batch count of its own would change schedules, intervals and the end of the run."""
    for clock in (state.clock, view.clock):
        with pytest.raises(AttributeError):
            setattr(clock, name, 7)


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


def test_the_state_has_no_room_for_more(state):
    """A misspelt assignment would be lost in silence."""
    with pytest.raises(AttributeError):
        state.outptus = 1


@pytest.mark.parametrize(
    "name", ["rank", "world_size", "local_rank", "data_rank", "layout", "mesh"]
)
def test_the_place_among_the_processes_is_fixed(name, state):
    """Nobody moves to another rank."""
    with pytest.raises(AttributeError):
        setattr(state, name, 1)


def test_a_generator_is_the_plugins_own(state):
    """The same one each time; another for another name; the global one isn't moved."""
    before = torch.get_rng_state()

    draws = [torch.rand((), generator=state.generator(name)) for name in ("a", "a", "b")]

    assert state.generator("a") is state.generator("a")
    assert len({draw.item() for draw in draws}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_is_seeded_by_the_runs_seed_and_its_name(make_trainer):
    """A run is repeatable, and another seed is another run."""
    draws = [
        torch.rand((), generator=make_trainer(seed=seed).state.generator("mixup")).item()
        for seed in (0, 0, 1)
    ]

    assert draws[0] == draws[1] != draws[2]


def test_a_generator_differs_between_ranks_unless_it_is_to_be_alike(make_trainer, monkeypatch):
    """Ranks that drew alike would see the same noise; noise on weights has to be alike."""

    def draws(rank):
        monkeypatch.setattr(Processes, "data_rank", rank)
        state = make_trainer().state
        generators = state.generator("a"), state.generator("a", alike=True)
        return [torch.rand((), generator=one).item() for one in generators]

    (own, alike), (others, as_alike) = draws(0), draws(1)

    assert own != others
    assert alike == as_alike


@pytest.mark.parametrize(
    ("value", "shown"),
    [(torch.zeros(2), r"not a tensor of \(2,\)"), (torch.zeros(0), r"not a tensor of \(0,\)"),
     ("0.5", "not str"), (None, "not NoneType"), ([1.0], "not list")],
)  # fmt: skip
def test_only_single_numbers_can_be_logged(value, shown, state):
    """Loggers are promised floats."""
    with pytest.raises(TypeError, match=shown):
        state.log("plugin/n", value)


def test_an_unknown_reduction_is_refused(state):
    """`max` over ranks isn't there yet, and would be taken for rank 0's value."""
    with pytest.raises(ValueError, match="reduce='max' is none of None, 'mean', 'sum'"):
        state.log("plugin/n", 1.0, reduce="max")


def test_a_logged_tensor_is_a_copy(make_trainer, make_plugin):
    """Whoever adds up in place logs what the sum was, not what it became."""
    total, heard = torch.zeros(()), []
    adder = make_plugin("adder", batch_end=lambda state: state.log("adder/n", total.add_(1)))
    watch = make_plugin("watch", log=lambda numbers: heard.append(numbers["adder/n"]))

    make_trainer(algorithms=[adder], callbacks=[watch]).fit()

    assert heard == [1.0, 2.0, 3.0]


def test_a_plugin_is_found_by_its_name(make_trainer, make_plugin):
    """Case, dashes and underscores folded."""
    plugin = make_plugin("weight-ema", batch_end=lambda state: None)
    state = make_trainer(algorithms=[plugin]).state

    assert state.plugin("Weight_EMA") is plugin


def test_a_plugin_that_is_not_active_is_named_with_the_closest(make_trainer, make_plugin):
    """And not None, which would fail somewhere else."""
    state = make_trainer(algorithms=[make_plugin("ema", batch_end=lambda state: None)]).state

    with pytest.raises(PluginError, match="no active plugin is named 'emma'; the closest is 'ema'"):
        state.plugin("emma")


def test_who_owns_an_action_is_known_by_name(make_trainer, make_plugin):
    """A method that suits some owners only must be able to stand off from the others."""
    plugin = make_plugin("squares", loss=lambda state: state.outputs.square().mean())
    of_task, of_plugin = make_trainer().state, make_trainer(algorithms=[plugin]).state

    assert of_task.owner("loss") == view_of(of_task, "watch").owner("loss") == "task"
    assert of_task.owner("forward") == "core"
    assert of_plugin.owner("loss") == "squares"


@pytest.mark.parametrize("name", ["losss", "batch_end"])
def test_what_is_no_action_has_no_owner(name, state):
    """An event is everybody's; a misspelt action is named with the closest."""
    with pytest.raises(PluginError, match=f"no action is named '{name}'") as caught:
        state.owner(name)

    assert "closest is 'loss'" in str(caught.value) or name == "batch_end"


def test_again_outside_of_a_wrapper_is_refused(state):
    """There is nothing that it could repeat."""
    with pytest.raises(PluginError, match="inside a wrapper of an action only"):
        state.again()


def test_inputs_and_targets_are_those_of_the_microbatch_then_of_the_batch(state):
    """One name for what is at hand; assignment replaces it there."""
    whole, part = (torch.ones(4), torch.zeros(4)), (torch.ones(2), torch.zeros(2))
    state.batch, state.microbatch = whole, part

    state.inputs, state.targets = "new inputs", "new targets"
    of_microbatch, state.microbatch = state.microbatch, None

    assert of_microbatch == ("new inputs", "new targets")
    assert (state.inputs, state.targets) == whole
