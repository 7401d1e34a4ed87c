"""A plugin type-checks under mypy strict, and a mistake is found before the run."""

from __future__ import annotations

import pytest

from eventloop.state import State
from eventloop.view import StateView

RIGHT = """
from collections.abc import Generator, Mapping
from eventloop import Moment, State, StateView, hookimpl
from torch import Tensor

class Watch:
    @hookimpl
    def batch_end(self, state: StateView) -> None:
        if state.loss is not None:
            state.log("watch/loss", state.loss * 2)
        rates: Mapping[str, float] = {
            name: one.param_groups[0]["lr"] for name, one in state.optimizers.items()
        }
        if state.clock.batch > 10 and rates:
            state.request_stop("enough")

    @hookimpl(every="10ba", rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        print(state.rank, at.epoch, numbers)

def norm(state: StateView) -> float:
    return float(sum(parameter.sum() for parameter in state.model.parameters()))

class Double:
    @hookimpl
    def before_forward(self, state: State) -> None:
        state.inputs = state.inputs * 2
        norm(state)

    @hookimpl(wrapper=True)
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        return 2 * (yield)
"""
WRONG = """
from eventloop import StateView, hookimpl

class Watch:
    @hookimpl
    def batch_end(self, state: StateView) -> None:
        state.loss = None  # assigned
        state.eval_metrics["test"] = {}  # item
        state.generator("watch")  # hidden
        state.los  # misspelt
        state.log("watch/loss", "text")  # argument
        state.loss * 2  # None
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory, run_mypy) -> dict[str, list[int]]:
    """Runs mypy on both samples once; gives the lines that it complains of."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    ran = run_mypy("right.py", "wrong.py", cwd=folder)
    lines: dict[str, list[int]] = {"right.py": [], "wrong.py": []}
    for line in ran.stdout.splitlines()[:-1]:
        name, number, kind, _ = line.split(":", 3)
        assert kind.strip() in ("error", "note"), ran.stdout
        lines[name].append(int(number))
    assert ran.stderr == ""
    return lines


@pytest.mark.nightly
def test_a_right_plugin_is_clean(complaints):
    """Both roles, a wrapper, and a function that takes whatever can be read."""
    assert complaints["right.py"] == []


@pytest.mark.nightly
def test_every_mistake_is_found(complaints):
    """Each line with a comment is one."""
    wrong = [number for number, line in enumerate(WRONG.splitlines(), 1) if "  # " in line]

    assert sorted(set(complaints["wrong.py"])) == wrong


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


ALGORITHMS_ALONE = {
    "again",
    "call",
    "capture",
    "companion",
    "current_count",
    "current_weight",
    "enclosed",
    "evaluating",
    "generator",
    "generators",
    "is_logging",
    "training_pass",
    "update",
}


def test_what_callbacks_do_not_see_is_a_decision():
    """An attribute that joins the State joins the view, too, or this list."""
    assert public(State) - public(StateView) == ALGORITHMS_ALONE
