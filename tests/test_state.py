"""The State: what it lets plugins read, change, draw, log and ask for."""

from __future__ import annotations

import pytest
import torch

from eventloop import State
from eventloop.distributed.processes import Processes
from eventloop.errors import PluginError
from eventloop.view import view_of


@pytest.fixture
def state(make_trainer) -> State:
    return make_trainer().state


@pytest.mark.parametrize("name", ["epoch", "batch", "sample", "token", "seconds", "previous"])
def test_the_loop_alone_moves_the_clock(name, state):
    """A batch count of its own would change schedules, intervals and the end of the run."""
    for clock in (state.clock, view_of(state, "watch").clock):
        with pytest.raises(AttributeError):
            setattr(clock, name, 7)


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
