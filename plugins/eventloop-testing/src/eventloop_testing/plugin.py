"""The pytest plugin: fixtures for tests of plugins. Nothing here imports torch before it is used.

Switch it off with `pytest -p no:eventloop_testing.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from eventloop.task import Task
    from eventloop.trainer import Trainer
    from eventloop_check import Check
    from eventloop_testing.case import Recorder


_on = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--device`."""
    group = parser.getgroup("eventloop")
    help_text = "where trainers of fixtures train that are given no device: cpu, pretend, or as torch names it"
    group.addoption("--device", default="cpu", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Switches the pretend accelerator on for all tests under `--device pretend`."""
    device = config.getoption("--device")
    if device == "cpu":
        return
    import eventloop_testing.case

    eventloop_testing.case.default_device = device
    if device == "pretend":
        config.stash[_on] = ExitStack()
        config.stash[_on].enter_context(eventloop_testing.pretend_device())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Switches the pretend accelerator off."""
    if _on in config.stash:
        with suppress(RuntimeError):  # already reported by the test that caused it
            config.stash[_on].close()


@pytest.fixture(autouse=True)
def _races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that caused a race, under `--device pretend`."""
    if _on not in request.config.stash:
        yield
        return
    import eventloop_testing

    with eventloop_testing.pretend_device():
        yield


@pytest.fixture
def tiny_task() -> Task:
    """A task that trains in milliseconds: 3 batches of 4 samples an epoch; `eventloop_testing.tiny_task()`."""
    import eventloop_testing

    return eventloop_testing.tiny_task()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Builds trainers without installed plugins, on the CPU, for one epoch; closes them.

    `make_trainer(task, algorithms=[...], callbacks=[...], **settings)`; each has its own
    folder. Under `pytest --device pretend` they train on the pretend accelerator.
    """
    import eventloop_testing

    built: list[Trainer] = []

    def make_trainer(task: object = None, **settings: Any) -> Trainer:
        folder = tmp_path / f"trainer{len(built)}"
        built.append(eventloop_testing.isolated_trainer(folder, task, **settings))
        return built[-1]

    yield make_trainer
    for trainer in reversed(built):  # each restores the process state that it replaced
        trainer.close()


@pytest.fixture
def two_ranks() -> Callable[..., list[Any]]:
    """Calls a function on two ranks under gloo, returns their results: `two_ranks(fit, steps=3)`."""
    import eventloop_testing

    return eventloop_testing.run_ranks


@pytest.fixture
def make_recorder() -> Callable[..., Recorder]:
    """Makes plugins whose `seen` lists the hooks in the order of their calls: `make_recorder(hooks, name)`."""
    import eventloop_testing

    return eventloop_testing.recorder


@pytest.fixture
def no_device_reads() -> Iterator[Check]:
    """An observer for trainers; the test fails if a hook reads from the device within a step.

    `make_trainer(algorithms=[...], observers=[no_device_reads])`.
    """
    from eventloop_check import Check

    check = Check()
    yield check
    reads = [str(finding) for finding in check.findings if finding.kind == "read"]
    if reads:
        pytest.fail("\n".join(reads), pytrace=False)


@pytest.fixture
def pretend_device() -> Iterator[torch.device]:
    """The pretend accelerator, switched on for the test: `make_trainer(device="pretend")`.

    The test fails if a pinned buffer is written, or memory reused, before a GPU would have finished
    with it.
    """
    import eventloop_testing

    with eventloop_testing.pretend_device() as device:
        yield device
