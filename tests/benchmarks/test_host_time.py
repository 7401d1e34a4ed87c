"""Host time is measured in benchmarks/; calls are counted here, which no noise touches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torchmetrics.classification import MulticlassAccuracy

PATH = Path(__file__).parents[2] / "benchmarks" / "host_time.py"
NUM_STEPS = 100


@pytest.fixture
def host_time(clean):
    """The module benchmarks/host_time.py."""
    spec = importlib.util.spec_from_file_location("host_time", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.import_module("sys").modules, "host_time", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def added_calls(host_time):
    """Returns the Python and builtin calls a step beyond the plain loop's."""
    batches = host_time.make_batches(2 * NUM_STEPS)

    def added_calls(num_plugins: int = 0, with_metric: bool = False) -> float:
        metrics = [MulticlassAccuracy(10, validate_args=False) if with_metric else None
                   for _ in range(2)]  # fmt: skip
        plain = host_time.plain_run(batches, metrics[0])
        ours = host_time.eventloop_run(batches, num_plugins, metrics[1])
        for run in (plain, ours):
            run(NUM_STEPS)  # what is done at the first step alone isn't counted
        return host_time.count_calls(ours, NUM_STEPS) - host_time.count_calls(plain, NUM_STEPS)

    return added_calls


@pytest.mark.parametrize(("with_metric", "most"), [(False, 60), (True, 100)])
def test_a_step_adds_few_calls(with_metric, most, added_calls):
    """Calls are what a framework costs; ignite adds 160, Lightning 1,500."""
    assert 0 < added_calls(with_metric=with_metric) <= most


def test_what_is_asked_every_batch_has_slots(make_trainer, make_task):
    """In Python 3.11 an attribute in a dict is read in three steps, one in a slot in one."""
    trainer = make_trainer(make_task())

    assert [type(one.target).__name__ for one in trainer._run.core_plugins
            if hasattr(one.target, "__dict__")] == []  # fmt: skip


def test_a_plugin_adds_a_few_calls_an_event(added_calls, host_time):
    """A used event costs its call: the plan's and the plugin's own."""
    without, with_one, with_three = (added_calls(count) for count in (0, 1, 3))

    assert with_one - without <= 3 * host_time.events_a_step()
    assert (with_three - with_one) / 2 <= 2 * host_time.events_a_step()


def test_the_counter_counts_calls(host_time):
    """Control: one builtin call more a step is one more."""

    def run(num_steps: int, numbers=()) -> None:
        for _ in range(num_steps):
            len(numbers)

    def run_twice(num_steps: int) -> None:
        for _ in range(num_steps):
            len(())
            len(())

    assert (host_time.count_calls(run, 10), host_time.count_calls(run_twice, 10)) == (1, 2)


def test_both_loops_train_the_same(host_time):
    """What is compared must do the same work."""
    import torch

    batches = host_time.make_batches(4)
    models = []
    make_model = host_time.make_model
    host_time.make_model = lambda: models.append(make_model()) or models[-1]

    for run in (host_time.plain_run(batches, None), host_time.eventloop_run(batches, 0, None)):
        run(8)

    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
