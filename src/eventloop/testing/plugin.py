"""The pytest plugin: fixtures for tests of plugins. Nothing here imports torch before it is used.

Switch it off with `-p no:eventloop.testing.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from eventloop.diagnostics.check import Check
    from eventloop.task import Task
    from eventloop.testing.case import Recorder
    from eventloop.trainer import Trainer


@pytest.fixture
def tiny_task() -> Task:
    """A task that trains in a blink: 3 batches of 4 samples an epoch; `testing.tiny_task()`."""
    from eventloop import testing

    return testing.tiny_task()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Builds trainers without installed plugins, on the CPU, for one epoch; closes them.

    `make_trainer(task, algorithms=[...], callbacks=[...], **settings)`; each has a folder of its
    own.
    """
    from eventloop import testing

    built: list[Trainer] = []

    def make_trainer(task: object = None, **given: Any) -> Trainer:
        folder = tmp_path / f"trainer{len(built)}"
        built.append(testing.isolated_trainer(folder, task, **given))
        return built[-1]

    yield make_trainer
    for trainer in built:
        trainer.close()


@pytest.fixture
def two_ranks() -> Callable[..., list[Any]]:
    """Calls a function on two ranks under gloo, returns their results: `two_ranks(fit, steps=3)`."""
    from eventloop import testing

    return testing.run_ranks


@pytest.fixture
def make_recorder() -> Callable[..., Recorder]:
    """Makes plugins whose `seen` lists hooks as they are called: `make_recorder(hooks, name)`."""
    from eventloop import testing

    return testing.recorder


@pytest.fixture
def no_device_reads() -> Iterator[Check]:
    """An observer for trainers; the test fails where a hook reads the device within a step.

    `make_trainer(algorithms=[...], observers=[no_device_reads])`.
    """
    from eventloop.diagnostics.check import Check

    check = Check()
    yield check
    reads = [str(finding) for finding in check.findings if finding.kind == "read"]
    if reads:
        pytest.fail("\n".join(reads), pytrace=False)
