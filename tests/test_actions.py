"""Actions: the loop asks for them in the order in which they are declared."""

from __future__ import annotations

import pytest

from eventloop import hookimpl
from eventloop.actions import ACTIONS


@pytest.fixture
def asked(make_trainer, make_task, make_batches):
    """The actions that a run of one batch in two microbatches asks for, in order."""
    seen = []

    def noting(name):
        return hookimpl(conditional=True)(lambda self, state: seen.append(name))

    notes = type("Notes", (), {name: noting(name) for name in ACTIONS})()
    task = make_task(eval_dataloaders=make_batches())
    make_trainer(task, algorithms=[notes], max_duration="1ba", microbatch_size=2).fit()
    return seen


def between(first, last):
    """Returns the declared actions from one to another."""
    names = list(ACTIONS)
    return names[names.index(first) : names.index(last) + 1]


def test_a_run_is_built_in_the_order_of_declaration(asked):
    """What builds something finds on the State what is declared before it."""
    expected = between("build_mesh", "build_metrics")
    expected.remove("wrap_companion")  # asked for by plugins

    assert asked[: len(expected)] == expected


def test_a_batch_is_trained_on_in_the_order_of_declaration(asked):
    """Who reads the list of actions reads the loop, and how often each is asked for."""
    # Before the first step, the loss of a microbatch is compared with that of its halves.
    step = ["count_batch", *asked[asked.index("train_batch") : asked.index("scheduler_step") + 1]]

    assert list(dict.fromkeys(step)) == between("count_batch", "scheduler_step")
    for name in between("train_batch", "scheduler_step"):
        assert step.count(name) == (2 if ACTIONS[name].per == "microbatch" else 1), name
