"""`check_plugin` lets good plugins pass, and finds each kind of bad one."""

from __future__ import annotations

import functools
import threading
import uuid

import pytest
import torch

from eventloop import hookimpl
from eventloop_testing import check_plugin, tiny_task


class Tame:
    """Sums the losses up on the device.

    Args:
        scale: what each is multiplied with.
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale
        self.total = torch.zeros(())

    @hookimpl
    def batch_end(self, state):
        self.total = self.total.to(state.device) + state.loss * self.scale

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state, version):
        self.total = state["total"]


@pytest.mark.about_cpu
@pytest.mark.sampled(2)
@pytest.mark.parametrize("role", ["algorithm", "callback"])
def test_a_tame_plugin_passes(role):
    """Control: what finds something in everybody finds nothing."""
    check_plugin(Tame, role=role)


@pytest.mark.nightly
@pytest.mark.about_cpu
def test_what_differs_from_run_to_run_by_its_nature_is_no_problem():
    """An id of a run comes back, and counts for nothing between two runs."""
    check_plugin(HasId, role="callback")


class Stops:
    """Has seen enough after two batches."""

    @hookimpl
    def should_stop(self, state):
        return state.clock.batch >= 2


class StopsAndWrites(Stops):
    """Does more than it may, too."""

    @hookimpl
    def batch_end(self, state):
        with torch.no_grad():
            next(state.model.parameters()).mul_(2)


@pytest.mark.nightly
def test_a_callback_that_stops_a_run_by_a_question_passes():
    """The run is shorter, and else what it would have been."""
    check_plugin(Stops, role="callback")

    with pytest.raises(AssertionError, match="ends with other weights than one without"):
        check_plugin(StopsAndWrites, role="callback")


@pytest.mark.nightly
def test_a_state_of_each_rank_passes():
    """Control for those that keep theirs as if it were one for all."""
    check_plugin(OnePerRank, role="algorithm")


class Undocumented(Tame):
    """Says nothing of its option."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__(scale=scale)


class Untyped(Tame):
    """Has an option of any type.

    Args:
        scale: what each loss is multiplied with.
    """

    def __init__(self, *, scale=1.0):
        super().__init__(scale=scale)


class Writes:
    """Changes the batch, though it may only watch."""

    @hookimpl
    def batch_start(self, state):
        state.batch[0].mul_(2)


class WritesUnseen:
    """Changes a weight in a way that leaves no trace in its version."""

    @hookimpl
    def batch_end(self, state):
        next(state.model.parameters()).data.mul_(2)


class Reads:
    """Waits for the device."""

    @hookimpl
    def batch_end(self, state):
        self.loss = float(state.loss)


class Random:
    """Draws from a generator that nobody seeds."""

    generator = torch.Generator()

    @hookimpl
    def before_forward(self, state):
        state.inputs = state.inputs + torch.rand((), generator=self.generator)


class Forgets(Tame):
    """Gives its state away, but doesn't take it back."""

    def load_state_dict(self, state, version):
        pass


class HalfState:
    """Can't be resumed."""

    @hookimpl
    def batch_end(self):
        pass

    def state_dict(self):
        return {}


class OddState(Tame):
    """Gives what no file can hold."""

    def state_dict(self):
        return {"total": self.total, "lock": {1, 2}}


class HidesItsState:
    """Changes what is trained, by what it forgets when the process ends."""

    def __init__(self) -> None:
        self.num_batches = 0

    @hookimpl
    def before_forward(self, state):
        self.num_batches += 1
        state.inputs = state.inputs / self.num_batches


class HidesACount(HidesItsState):
    """Tells of it, and changes nothing."""

    @hookimpl
    def before_forward(self, state):
        self.num_batches += 1
        state.log("hides/count", self.num_batches)


class HidesInAText(HidesItsState):
    """Tells of it in a table."""

    @hookimpl
    def before_forward(self, state):
        self.num_batches += 1
        state.log_text("hides/text", {"count": [self.num_batches]})


class SavesHalf(Tame):
    """Leaves out of its state what the state depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    @hookimpl
    def batch_end(self, state):
        self.total, self.last = self.total + self.last, state.loss.clone()


class HasId(Tame):
    """Has an id that is another in each run."""

    def __init__(self):
        super().__init__()
        self.id = uuid.uuid4().hex

    def state_dict(self):
        return {"of_this_run": {"id": self.id}, "total": self.total}

    def load_state_dict(self, state, version):
        self.id, self.total = state["of_this_run"]["id"], state["total"]


class LosesId(HasId):
    """Takes another id when it goes on."""

    def load_state_dict(self, state, version):
        self.total = state["total"]


class SavesHalfBesideId(HasId, SavesHalf):
    """Forgets something; that runs have other ids doesn't hide it."""


class CanNotLoad(Tame):
    """Understands only what an older version wrote."""

    def load_state_dict(self, state, version):
        self.total = state["sum"]


class OnePerRank(HidesItsState):
    """Keeps something else on each rank."""

    state_per_rank = True

    @hookimpl
    def before_forward(self, state):
        self.num_batches += 1 + state.rank
        state.inputs = state.inputs / self.num_batches

    def state_dict(self):
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state, version):
        self.num_batches = state["num_batches"]


class OneForAll(OnePerRank):
    """Says so of none."""

    state_per_rank = False


class FailsToClose:
    """Closes what it never opened."""

    @hookimpl
    def training_start(self):
        self.is_open = True

    @hookimpl
    def exception(self):
        self.missing.close()


class Thread:
    """Leaves a thread behind."""

    @hookimpl
    def init(self):
        self.end = threading.Event()
        threading.Thread(target=self.end.wait, name="left-behind", daemon=True).start()


class Drifts:
    """Changes weights by what one rank alone draws."""

    @hookimpl
    @torch.no_grad()
    def batch_end(self, state):
        weight = next(state.model.parameters())
        weight += 1e-3 * torch.rand((), generator=state.generator("drifts"))


class Hangs:
    """Fails on one rank."""

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1:
            raise LookupError("no such rank")


FOUND = [
    (Undocumented, "algorithm", "option scale isn't documented"),
    (Untyped, "algorithm", "option scale has no type"),
    (Writes, "callback", "writes (Trainer(callbacks=...)), batch_start: wrote in place into"),
    (WritesUnseen, "callback", "a run with it ends with other weights than one without"),
    (Reads, "callback", "batch_end: read from the device with item()"),
    (Reads, "algorithm", "batch_end: read from the device with item()"),
    (Random, "algorithm", "two runs with one seed end with different weights"),
    (Forgets, "algorithm", "what load_state_dict was given isn't what state_dict gives"),
    (HalfState, "algorithm", "no trainer can be built with it: it has state_dict without"),
    (OddState, "algorithm", "'state_dict().lock' can't be saved: it is a set"),
    (LosesId, "callback", "isn't what state_dict gives then: of_this_run/id is"),
    (SavesHalfBesideId, "callback", "ends with another state_dict() than one in one go: total is"),
    (
        HidesItsState,
        "algorithm",
        "stopped after batch 4 and resumed ends with other weights than one in one go; what it "
        "keeps from batch to batch belongs in state_dict() and load_state_dict(state, version)",
    ),
    (
        HidesACount,
        "callback",
        "resumed logs 1 as 'hides/count' at batch 5, where one in one go logs 5; what it keeps",
    ),
    (
        HidesInAText,
        "callback",
        "resumed logs {'count': [1]} as 'hides/text' at batch 5, where one in one go logs {'count': [5]}",
    ),
    (SavesHalf, "callback", "ends with another state_dict() than one in one go: total is"),
    (CanNotLoad, "callback", "a run with it can't be resumed: KeyError: 'sum'"),
    (
        OneForAll,
        "algorithm",
        "of two, a run that is stopped after batch 3 and resumed ends with other weights than one in "
        "one go; something that it keeps isn't in state_dict(), or doesn't come back; where each rank "
        "keeps something else, write state_per_rank = True",
    ),
    (FailsToClose, "callback", "after another plugin's failure it fails, too"),
    (Thread, "callback", "threads go on after close: left-behind"),
    (Drifts, "algorithm", "ranks 0 and 1 have drifted apart"),
    (Hangs, "callback", "two ranks with it fail: rank 1 raised"),
]


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("plugin", "role", "message"), FOUND)
def test_what_is_wrong_is_found(plugin, role, message):
    """Each kind, by what the author has to change."""
    with pytest.raises(AssertionError, match=f"{plugin.__name__} isn't what every") as caught:
        check_plugin(plugin, role=role)

    assert message in str(caught.value)


class Forgetful(torch.nn.Linear):
    """A model whose state isn't in any checkpoint: it counts calls in the contents of a cache."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.cached = functools.cache(lambda number: number)

    def forward(self, inputs):
        num_calls = self.cached(self.cached.cache_info().currsize + 1)
        return super().forward(inputs / num_calls)


@pytest.mark.nightly
@pytest.mark.about_cpu
def test_a_task_that_forgets_is_not_the_plugins_fault():
    """Who looks for it in the plugin would look for long."""
    with pytest.raises(AssertionError, match="the task isn't resumed exactly") as caught:
        check_plugin(Tame, role="callback", task=lambda: tiny_task(model=lambda: Forgetful(3, 3)))

    assert "\n2." not in str(caught.value)


def test_a_plugin_that_is_not_installed_needs_a_role():
    """An algorithm may do what a callback may not."""
    with pytest.raises(ValueError, match=r"Tame isn't installed; give role="):
        check_plugin(Tame)


@pytest.mark.nightly
@pytest.mark.about_cpu
def test_a_plugin_is_built_with_options_and_tried_on_a_task_of_its_authors():
    """A plugin for language models needs one."""
    built = []

    class Needs(Tame):
        """Needs an option.

        Args:
            scale: has no default.
        """

        def __init__(self, *, scale: float) -> None:
            super().__init__(scale=scale)

    def task():
        built.append(1)
        return tiny_task(eval_dataloaders=None)

    check_plugin(Needs, role="callback", options={"scale": 2.0}, task=task)

    assert len(built) > 1


class Mixes:
    """Multiplies a loss on the device by numbers that stay on the host."""

    def __init__(self) -> None:
        self.factors = torch.tensor([1.0, 3.0])

    @hookimpl
    def before_backward(self, state):
        state.loss = (state.loss * self.factors).mean()


class CopiesToTheHost:
    """Looks at the weights in each step, which on the CPU is no read."""

    @hookimpl
    def batch_end(self, state):
        self.weights = [one.detach().cpu() for one in state.model.parameters()]


ON_AN_ACCELERATOR = {
    Mixes: "on the pretend accelerator a run with it fails: MixedDevicesError",
    CopiesToTheHost: "on the pretend accelerator, .*batch_end: read from the device with _to_copy",
}


@pytest.mark.nightly
@pytest.mark.about_cpu
@pytest.mark.parametrize("plugin", ON_AN_ACCELERATOR, ids=lambda one: one.__name__)
def test_a_mistake_that_only_an_accelerator_shows_is_found(plugin):
    """Its author has none, and its users do."""
    with pytest.raises(AssertionError, match=ON_AN_ACCELERATOR[plugin]):
        check_plugin(plugin, role="algorithm")
    assert not torch.accelerator.is_available()


class Averages:
    """Adds up losses on the device."""

    def __init__(self) -> None:
        self.total = None

    @hookimpl
    def after_train_batch(self, state):
        if self.total is None:
            self.total = torch.zeros(1, device=state.device)
        self.total = self.total + state.loss.detach()

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state, version):
        self.total = state["total"]


class AveragesOnTheDevice(Averages):
    """Puts its state back where it was."""

    @hookimpl
    def after_load(self, state):
        if self.total is not None:
            self.total = self.total.to(state.device)


class ScalesByItsState(Averages):
    """Uses its state in the loss, a copy of what was loaded."""

    def load_state_dict(self, state, version):
        self.total = state["total"].clone()

    @hookimpl
    def before_backward(self, state):
        if self.total is not None:
            state.loss = state.loss * (1 + 0 * self.total).mean()


@pytest.mark.about_cpu
@pytest.mark.parametrize("plugin", [Averages, ScalesByItsState])
def test_a_state_that_is_put_back_on_the_host_is_found(plugin):
    """On the CPU a checkpoint's tensors are where they belong; on a GPU the resumed run crashes."""
    expected = (
        r"^\S+ isn't what every plugin must be\n"
        r"1\. on the pretend accelerator a run with it can't be resumed: MixedDevicesError"
    )

    with pytest.raises(AssertionError, match=expected):
        check_plugin(plugin, role="algorithm")


@pytest.mark.about_cpu
def test_a_state_that_is_put_back_on_the_device_passes():
    """Control: the plugin with the one line that the other lacks."""
    check_plugin(AveragesOnTheDevice, role="algorithm")
