"""`check_plugin`: what must hold for any plugin, whatever it does."""

from __future__ import annotations

import functools
import inspect
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eventloop.check import Check, Finding
from eventloop.hooks import hookimpl
from eventloop.plugin.configure import plugin_options
from eventloop.plugin.discover import discover
from eventloop.task import Task
from eventloop.testing.ranks import RankError, run_ranks
from eventloop.testing.runs import isolated_trainer, tiny_task
from eventloop.trainer import Trainer

Role = Literal["algorithm", "callback"]


def check_plugin(
    plugin: type,
    *,
    role: Role | None = None,
    options: Mapping[str, Any] | None = None,
    task: Callable[[], Task] = tiny_task,
    world_size: int = 1,
) -> None:
    """Checks what must hold for any plugin, in small runs on the CPU.

    Its options are documented and typed; two runs give the same weights, whatever the order in
    which it and others are handed over; no step reads the device; it closes after a run, without
    one, and after a failure; its state comes back from `state_dict`. A callback changes nothing:
    no tensor is written, and the weights are those of a run without it.

    What needs checkpoints isn't checked: there are none yet.

    Args:
        plugin: the class; built anew for each run.
        role: as the entry point says; needed where the plugin isn't installed.
        options: what it is built with; needed where an option has no default.
        task: makes the task, afresh for each run.
        world_size: how many ranks the runs have; for plugins that one process doesn't suit.

    Raises:
        AssertionError: something doesn't hold; the message lists everything.
        ValueError: nobody says which role it has.
    """
    role = role or _installed_role(plugin)
    with tempfile.TemporaryDirectory(prefix="eventloop-check-") as folder:
        case = functools.partial(_Case, plugin, role, dict(options or {}), task, Path(folder))
        if world_size == 1:
            problems = _problems(case, (*_CHECKS, _two_ranks_end_alike))
        else:
            problems, *_ = run_ranks(_problems, case, _CHECKS, world_size=world_size)
    if problems:
        listed = "\n".join(f"{idx}. {problem}" for idx, problem in enumerate(problems, 1))
        raise AssertionError(f"{plugin.__name__} isn't what every plugin must be\n{listed}")


class _Run(NamedTuple):
    weights: dict[str, Tensor]
    findings: list[Finding]
    called: dict[str, list[str]]


@dataclass
class _Case:
    """A plugin under check."""

    plugin: type
    role: Role
    options: dict[str, Any]
    task: Callable[[], Task]
    folder: Path
    origin: str = field(init=False)

    def __post_init__(self) -> None:
        with self.trainer(self.build()) as trainer:
            self.origin = next(
                one.origin for one in trainer.plugins if isinstance(one.target, self.plugin)
            )

    def build(self) -> Any:
        return self.plugin(**self.options)

    def trainer(
        self, *plugins: object, algorithms: tuple[object, ...] = (), **given: Any
    ) -> Trainer:
        """Builds a trainer with instances of the plugin, and with other algorithms before it."""
        given = {"max_duration": "2ep", **given}
        mine = {"algorithm": [*algorithms], "callback": []}
        mine[self.role] += plugins
        folder = tempfile.mkdtemp(dir=self.folder)
        return isolated_trainer(
            Path(folder),
            self.task(),
            algorithms=mine["algorithm"],
            callbacks=mine["callback"],
            **given,
        )

    def run(self, *plugins: object, **given: Any) -> _Run:
        """Trains, evaluates and predicts; gives the weights, what was found and who was called."""
        check = Check()
        with self.trainer(*plugins, observers=[check], **given) as trainer:
            trainer.fit()
            if trainer.state.eval_dataloaders:
                trainer.eval()
                trainer.predict(next(iter(trainer.state.eval_dataloaders.values())))
            weights = {
                name: tensor.clone() for name, tensor in trainer.state.model.state_dict().items()
            }
            called = {
                name: [one.plugin.name for one in ordered]
                for name, ordered in trainer.assembly.implementations.items()
            }
        return _Run(weights, check.findings, called)


class _Other:
    """An algorithm that everything else must get along with: it shrinks every gradient."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)


class _Fails:
    """An algorithm that ends a run at its second batch."""

    name = "fails"

    @hookimpl
    def batch_end(self, state: Any) -> None:
        if state.clock.batch == 2:
            raise _ExpectedError


class _ExpectedError(Exception):
    pass


def _options(case: _Case) -> Iterator[str]:
    parameters = inspect.signature(case.plugin).parameters
    for option in plugin_options(case.plugin).values():
        if parameters[option.name].annotation is inspect.Parameter.empty:
            yield f"option {option.name} has no type; annotate it in __init__"
        if not option.doc:
            yield f"option {option.name} isn't documented; add it to Args: in the class's docstring"


def _leaves_the_step_alone(case: _Case) -> Iterator[str]:
    first, again = case.run(case.build()), case.run(case.build())
    yield from (str(one) for one in first.findings if one.who.startswith(case.origin))
    if not _equal(first.weights, again.weights):
        yield "two runs with one seed end with different weights; draw from state.generator(name)"
    if case.role == "callback" and not _equal(first.weights, case.run().weights):
        yield "a run with it ends with other weights than one without; a callback may only watch"


def _runs_alike_in_any_order(case: _Case) -> Iterator[str]:
    names = ("aa-other", "zz-other")
    runs = [
        case.run(case.build(), algorithms=tuple(_Other(name) for name in order))
        for order in (names, names[::-1])
    ]
    if runs[0].called != runs[1].called:
        yield "the order of calls depends on the order in which plugins are handed over"
    if not _equal(runs[0].weights, runs[1].weights):
        yield "the weights depend on the order in which plugins are handed over"


def _closes(case: _Case) -> Iterator[str]:
    threads = set(threading.enumerate())
    unused = case.trainer(case.build())
    unused.close()
    unused.close()
    try:
        with case.trainer(case.build(), algorithms=(_Fails(),)) as trainer:
            trainer.fit()
    except _ExpectedError as error:
        yield from (
            f"after another plugin's failure it fails, too: {note}"
            for note in getattr(error, "__notes__", ())
            if note.startswith("then also")
        )
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    if left:
        yield f"threads go on after close: {', '.join(left)}"


def _state_comes_back(case: _Case) -> Iterator[str]:
    has = [callable(getattr(case.plugin, name, None)) for name in ("state_dict", "load_state_dict")]
    if any(has) and not all(has):
        yield "it has one of state_dict and load_state_dict(state, version) without the other"
    if not all(has):
        return
    plugin, fresh = case.build(), case.build()
    with case.trainer(plugin) as trainer:
        trainer.fit()
        saved = plugin.state_dict()
    yield from _unsaveable(saved, "state_dict()")
    with case.trainer(fresh):
        fresh.load_state_dict(saved, "")
        if not _equal(fresh.state_dict(), saved):
            yield "what load_state_dict was given isn't what state_dict gives afterwards"


def _two_ranks_end_alike(case: _Case) -> Iterator[str]:
    def train() -> dict[str, Tensor]:
        with case.trainer(case.build()) as trainer:
            trainer.fit()
            return {name: one.clone() for name, one in trainer.state.model.state_dict().items()}

    try:
        one, other = run_ranks(train)
    except (RankError, TimeoutError) as error:
        yield f"two ranks with it fail: {error}"
    else:
        if not _equal(one, other):
            yield "two ranks with it end with different weights; draw alike what changes the model"


_CHECKS = (
    _options,
    _leaves_the_step_alone,
    _runs_alike_in_any_order,
    _closes,
    _state_comes_back,
)


def _problems(
    make_case: Callable[[], _Case], checks: Iterable[Callable[[_Case], Iterator[str]]]
) -> list[str]:
    case = make_case()
    return [problem for check in checks for problem in check(case)]


def _unsaveable(value: Any, where: str) -> Iterator[str]:
    """Finds what is neither a tensor nor a JSON value nor a nest of them."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {key!r}; keys must be text"
            yield from _unsaveable(one, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for idx, one in enumerate(value):
            yield from _unsaveable(one, f"{where}[{idx}]")
    elif not (value is None or isinstance(value, (Tensor, bool, int, float, str))):
        yield f"{where} is a {type(value).__name__}; only tensors and JSON values can be saved"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _installed_role(plugin: type) -> Role:
    package = plugin.__module__.partition(".")[0]
    for found in discover():
        is_near = found.entry_point.module.partition(".")[0] == package
        if is_near and found.entry_point.load() is plugin:
            return "algorithm" if found.role == "algorithm" else "callback"
    raise ValueError(f'{plugin.__name__} isn\'t installed; give role="algorithm" or "callback"')
