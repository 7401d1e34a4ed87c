"""The check: who assigns what, who writes in place, and who reads from the device."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

# Private, but torch's documented way to see every operation, and without a public name
# (torch 2.13).
from torch.utils._python_dispatch import TorchDispatchMode

from eventloop.commands import counted, write_lines, write_table
from eventloop.toolbox import caller, instead, moment_in, with_context
from eventloop_check.snapshots import Part, StateSnapshot

if TYPE_CHECKING:
    from eventloop import State
    from eventloop.toolbox import Implementation

# The core's own, in which the task's model and loss run.
_TASK_INSIDE_CORE = {"forward": "model", "loss": "loss"}
_READ = "aten::_local_scalar_dense"
_ACTS = ("call", "log", "log_text", "request_checkpoint", "request_stop", "update")
# They read without an operation that could be seen.
_METHODS = {"tolist": "tolist", "numpy": "numpy", "__repr__": "print"}
_TORCH = Path(torch.__file__).parent
Kind = Literal["write", "read", "answer"]
# Where tensors' methods are, and what calls an operation (torch 2.13).
_OF_TENSORS = tuple(
    str(_TORCH / one)
    for one in ("_tensor.py", "_tensor_str.py", "_ops.py", "_compile.py", "overrides.py",
                "_dynamo/eval_frame.py", "utils/_device.py", "utils/_python_dispatch.py")
)  # fmt: skip


@dataclass
class Finding:
    """Something that a plugin must not do, and did.

    Args:
        kind: whether it wrote, read, or answered otherwise than on other ranks.
        plugin: its name and distribution.
        who: plugin, distribution and hook.
        what: what it did.
        where: file and line, where they are known.
        moment: epoch and batch of the first time.
        times: how often.
    """

    kind: Kind
    plugin: str
    who: str
    what: str
    where: str
    moment: str
    times: int = 0

    def __str__(self) -> str:
        often = "" if self.times == 1 else f", {self.times} times"
        return f"{self.who}: {self.what}{often}, first in {self.moment}\n  at   {self.where}"


class Check:
    """Watches a run for what plugins do to the State and to the device.

    In-place writes show in a tensor's version; one into `.data` or through NumPy leaves none.
    Around callbacks, what optimizers hold, training modes and the random generators that all share
    are compared, too, and around all who answer a question, `unsuitable` or `header_note`, which may
    change, log and request nothing.
    Answers are compared across ranks, each of which then waits for the others.

    As a context manager, which `eventloop fit --check` enters, it prints at its end what was found.
    """

    columns = ("attribute", "hook", "plugin", "times")

    def __init__(self) -> None:
        self._writes: Counter[tuple[str, str, str]] = Counter()
        self._findings: dict[tuple[str, str], Finding] = {}
        self._under_way: list[tuple[Implementation, Any]] = []
        self._replaced: dict[str, Any] = {}  # by a collection: what the attributes were before
        self._reads = HostReads(self._found_read)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, in the order in which it was found."""
        return list(self._findings.values())

    @property
    def status(self) -> int:
        """The exit status of a run that it watched: 1 if it found something, else 0."""
        return int(bool(self._findings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if rows := list(self.rows()):
            write_table(self.columns, rows)
        found = self.findings
        write_lines([f"check: {counted(len(found), 'problem') if found else 'no problem'}"])
        write_lines([line for one in found for line in str(one).splitlines()])

    def rows(self) -> Iterator[Sequence[str]]:
        """Yields the writers by attribute and hook."""
        for (attribute, hook, plugin), times in sorted(self._writes.items()):
            yield attribute, hook, plugin, str(times)

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation with an eye on what it does."""
        role = one.plugin.role
        hook = one.hook.name
        if role == "core" and hook not in _TASK_INSIDE_CORE:
            return one

        def given(state: State) -> Any:
            found = functools.partial(self._found_change, one, state)
            if one.hook.kind == "collection" and _only_answers(one):
                return RecordedState(state, found, self._replaced)
            if role in ("task", "algorithm") or _only_answers(one):
                return RecordedState(state, found)
            return state

        seen = with_context(
            one, lambda state: self._stretch(one, state), in_halves=True, given=given
        )
        return self._compared(seen) if one.hook.kind == "question" else seen

    def _compared(self, one: Implementation) -> Implementation:
        """Returns the implementation of a question with its answers compared across ranks."""
        if one.wrapper:
            return one
        call = caller(one)

        def answer(state: Any, *rest: Any) -> Any:
            mine = call(state, *rest)
            answers = state.all_gather(mine)
            if any(theirs != mine for theirs in answers):
                shown = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(answers))
                what = f"answered differently on different ranks: {shown}"
                self._found("answer", one, state, what, one.where)
            return mine

        return instead(one, answer)

    @contextmanager
    def _stretch(self, one: Implementation, state: Any) -> Iterator[None]:
        """Compares before and after a stretch of an implementation's own code."""
        everything = one.plugin.role == "callback" or _only_answers(one)
        before = StateSnapshot(state, everything=everything) if one.plugin.role != "core" else None
        in_step = state.batch is not None and state.eval_name is None and one.hook.per != "run"
        self._under_way.append((one, state))
        outer = self._replaced
        self._replaced = {}
        try:
            with self._reads if in_step else nullcontext():
                yield
        finally:
            self._under_way.pop()
            for verb, part in before.changes(state) if before is not None else ():
                self._found_change(one, state, verb, part)
            replaced = self._replaced
            self._replaced = outer
            for name, value in replaced.items():
                if getattr(state, name) is not value:
                    self._found_change(one, state, "assigned", Part(name))

    def _found_change(self, one: Implementation, state: Any, verb: str, part: Part) -> None:
        if _only_answers(one) or one.plugin.role == "callback":
            whose = "state's " if part.attribute else ""
            rule = (
                f"{one.hook.kind} only answers" if _only_answers(one) else "callback may only watch"
            )
            self._found("write", one, state, f"{verb} {whose}{part}; a {rule}", one.where)
        elif verb != "called":
            how = part.attribute if verb == "assigned" else f"{part.attribute} (in place)"
            self._writes[how, one.hook.name, one.plugin.name] += 1

    def _found_read(self, tensor: Tensor, how: str) -> None:
        one, state = self._under_way[-1]
        if tensor.device.type == state.device.type and not _is_torchs_own():
            what = f"read from the device with {how}()"
            self._found("read", one, state, what, _outside() or one.where)

    def _found(self, kind: Kind, one: Implementation, state: Any, what: str, where: str) -> None:
        who = one.origin
        if one.plugin.role == "core":
            who = f"the task's {_TASK_INSIDE_CORE[one.hook.name]}, in {one.hook.name}"
        moment = f"{moment_in(one.hook.name, state)}, rank {state.layout.label(state.rank)}"
        finding = self._findings.setdefault(
            (who, what), Finding(kind, one.plugin.origin, who, what, where, moment)
        )
        finding.times += 1


class RecordedState:
    """The State, or a view of it, with a note of each assignment and of what logs or requests.

    It wraps, because the State of a run that isn't checked shall not even be asked.

    Args:
        found: called with what was done, and with which attribute.
        replaced: takes the first value of each attribute that is assigned, instead of telling of it:
            for one who may try a batch with `state.call`, and leaves all as it was.
    """

    __slots__ = ("_found", "_replaced", "_state")

    def __init__(
        self,
        state: State,
        found: Callable[[str, Part], None],
        replaced: dict[str, Any] | None = None,
    ) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_found", found)
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        if name in _ACTS and (name != "call" or self._replaced is None):
            self._found("called", Part(name))
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._replaced is None:
            self._found("assigned", Part(name))
        else:
            self._replaced.setdefault(name, getattr(self._state, name))
        setattr(self._state, name, value)


def _only_answers(one: Implementation) -> bool:
    """Whether a hook may change nothing: a question, or what the core asks a plugin about itself."""
    is_of_itself = one.hook.kind == "collection" and not one.hook.declared_by
    return is_of_itself or one.hook.kind == "question"


def _is_torchs_own() -> bool:
    """Whether torch's own code made the current read, such as an optimizer reading its step count.

    What a tensor's own methods read, `format` or `in`, their caller has asked for.
    """
    for frame, _ in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((*_OF_TENSORS, "<")):
            return file.startswith(f"{_TORCH}{os.sep}")
    return False


def _outside() -> str:
    """Returns the innermost line under way that is neither torch's nor eventloop's.

    Methods of tensors of the pretend device, where it is in use, stand for torch's.
    """
    pretend = sys.modules.get("eventloop_testing.pretend")
    files = [torch.__file__, __file__, *([] if pretend is None else [str(pretend.__file__)])]
    insides = [f"{Path(file).parent}{os.sep}" for file in files]
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith((*insides, "<")) and Path(file).name != "contextlib.py":
            return f"{file}:{line}"
    return ""


class HostReads:
    """Reports every value that is read from a tensor inside its `with`; may be nested.

    On a CUDA device each read waits until everything before it is computed; on the CPU nothing
    waits, but the same calls are seen.

    Args:
        found: called at each read with the tensor and with how it is read: "item", "tolist",
            "numpy", "print"; "_to_copy" and "copy_" where a copy from another device is waited for.
    """

    def __init__(self, found: Callable[[Tensor, str], None]) -> None:
        self._found = found
        self._mode = _Operations(self._found_in_torch)
        self._depth = 0
        self._is_reading = False
        self._methods: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:
            for name, how in _METHODS.items():
                self._methods[name] = vars(Tensor).get(name)
                setattr(Tensor, name, self._reporting(how, getattr(Tensor, name)))
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
            for name, method in self._methods.items():
                if method is None:
                    delattr(Tensor, name)  # an inherited one shows again
                else:
                    setattr(Tensor, name, method)

    def _found_in_torch(self, tensor: Tensor, how: str) -> None:
        if not self._is_reading:  # of a device `tolist` copies first
            self._found(tensor, how)

    def _reporting(self, how: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_reading:  # to print reads entries one by one
                return method(tensor, *args, **kwargs)
            self._is_reading = True
            try:
                self._found(tensor, how)
                return method(tensor, *args, **kwargs)
            finally:
                self._is_reading = False

        return read


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Callable[[Tensor, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() == _READ:
            self._found(args[0], "item")
        elif (copied := _copied_to_host(func.name(), args, kwargs)) is not None:
            self._found(copied, func.name().removeprefix("aten::"))
        return func(*args, **kwargs)


def _copied_to_host(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the tensor that an operation copies to the host while the host waits."""
    is_waiting = not kwargs.get("non_blocking")
    if name == "aten::_to_copy" and is_waiting:
        device = kwargs.get("device")
        is_to_host = device is not None and torch.device(device).type == "cpu"
        return args[0] if is_to_host and not args[0].is_cpu else None
    if name == "aten::copy_" and is_waiting and len(args) < 3:
        return args[1] if args[0].is_cpu and not args[1].is_cpu else None
    return None
