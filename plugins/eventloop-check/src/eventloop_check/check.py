"""The check: records assignments to the State, writes in place, and reads from the device."""

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

# Implementations of the core that run the task's model and loss.
_TASK_INSIDE_CORE = {"forward": "model", "loss": "loss"}
_READ = "aten::_local_scalar_dense"
_ACTS = ("call", "log", "log_text", "request_checkpoint", "request_stop", "update")
# These read from a tensor without an operation that a dispatch mode could see.
_METHODS = {"tolist": "tolist", "numpy": "numpy", "__repr__": "print"}
_TORCH = Path(torch.__file__).parent
Kind = Literal["write", "read", "answer"]
# torch's files between a user's call and an operation (torch 2.13).
_OF_TENSORS = tuple(
    str(_TORCH / file)
    for file in ("_tensor.py", "_tensor_str.py", "_ops.py", "_compile.py", "overrides.py",
                "_dynamo/eval_frame.py", "utils/_device.py", "utils/_python_dispatch.py")
)  # fmt: skip


@dataclass
class Finding:
    """A violation: something that a plugin did, but must not do.

    Args:
        kind: "write", "read", or "answer", an answer that differs between ranks.
        plugin: name and distribution of the plugin.
        who: plugin, distribution and hook.
        what: description of the violation.
        where: file and line, as far as known.
        moment: epoch and batch of the first time.
        times: number of occurrences.
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

    Writes in place are detected by a tensor's version counter; writes into `.data` or through NumPy
    leave no trace. For callbacks, the check also compares optimizer states, training modes and the
    global random generators; likewise for implementations of questions such as `unsuitable` and
    `header_note`, which may neither change, log nor request anything. Answers are compared across
    ranks, so each rank waits for the others.

    As a context manager, which `eventloop fit --check` enters, it prints its findings at the end.
    """

    columns = ("attribute", "hook", "plugin", "times")

    def __init__(self) -> None:
        self._writes: Counter[tuple[str, str, str]] = Counter()
        self._findings: dict[tuple[str, str], Finding] = {}
        self._under_way: list[tuple[Implementation, Any]] = []
        # Inside a collection: the original values of the attributes assigned so far.
        self._replaced: dict[str, Any] = {}
        self._reads = HostReads(self._found_read)

    @property
    def findings(self) -> list[Finding]:
        """The violations, in the order in which they were found."""
        return list(self._findings.values())

    @property
    def status(self) -> int:
        """The exit status of the watched run: 1 if there are findings, else 0."""
        return int(bool(self._findings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if rows := list(self.rows()):
            write_table(self.columns, rows)
        findings = self.findings
        write_lines([f"check: {counted(len(findings), 'problem') if findings else 'no problem'}"])
        write_lines([line for finding in findings for line in str(finding).splitlines()])

    def rows(self) -> Iterator[Sequence[str]]:
        """Yields the writers by attribute and hook."""
        for (attribute, hook, plugin), times in sorted(self._writes.items()):
            yield attribute, hook, plugin, str(times)

    def observed(self, impl: Implementation) -> Implementation:
        """Returns the implementation with all its actions recorded."""
        role = impl.plugin.role
        hook = impl.hook.name
        if role == "core" and hook not in _TASK_INSIDE_CORE:
            return impl

        def state_given(state: State) -> Any:
            report_change = functools.partial(self._found_change, impl, state)
            if impl.hook.kind == "collection" and _only_answers(impl):
                return RecordedState(state, report_change, self._replaced)
            if role in ("task", "algorithm") or _only_answers(impl):
                return RecordedState(state, report_change)
            return state

        watched = with_context(
            impl, lambda state: self._stretch(impl, state), in_halves=True, given=state_given
        )
        return self._compared(watched) if impl.hook.kind == "question" else watched

    def _compared(self, impl: Implementation) -> Implementation:
        """Returns the implementation of a question with its answers compared across ranks."""
        if impl.wrapper:
            return impl
        call = caller(impl)

        def answer(state: Any, *arguments: Any) -> Any:
            local_answer = call(state, *arguments)
            answers = state.all_gather(local_answer)
            if any(rank_answer != local_answer for rank_answer in answers):
                shown = ", ".join(
                    f"rank {rank} {rank_answer}" for rank, rank_answer in enumerate(answers)
                )
                what = f"answered differently on different ranks: {shown}"
                self._found("answer", impl, state, what, impl.where)
            return local_answer

        return instead(impl, answer)

    @contextmanager
    def _stretch(self, impl: Implementation, state: Any) -> Iterator[None]:
        """Compares snapshots before and after a stretch of an implementation's own code."""
        everything = impl.plugin.role == "callback" or _only_answers(impl)
        snapshot = (
            StateSnapshot(state, everything=everything) if impl.plugin.role != "core" else None
        )
        in_step = state.batch is not None and state.eval_name is None and impl.hook.per != "run"
        self._under_way.append((impl, state))
        # A collection may call other hooks, so stretches nest.
        outer_replaced = self._replaced
        self._replaced = {}
        try:
            with self._reads if in_step else nullcontext():
                yield
        finally:
            self._under_way.pop()
            for verb, part in snapshot.changes(state) if snapshot is not None else ():
                self._found_change(impl, state, verb, part)
            replaced = self._replaced
            self._replaced = outer_replaced
            for name, value in replaced.items():
                if getattr(state, name) is not value:
                    self._found_change(impl, state, "assigned", Part(name))

    def _found_change(self, impl: Implementation, state: Any, verb: str, changed: Part) -> None:
        if _only_answers(impl) or impl.plugin.role == "callback":
            owner = "state's " if changed.attribute else ""
            rule = (
                f"{impl.hook.kind} only answers"
                if _only_answers(impl)
                else "callback may only watch"
            )
            self._found("write", impl, state, f"{verb} {owner}{changed}; a {rule}", impl.where)
        elif verb != "called":
            how = changed.attribute if verb == "assigned" else f"{changed.attribute} (in place)"
            self._writes[how, impl.hook.name, impl.plugin.name] += 1

    def _found_read(self, tensor: Tensor, how: str) -> None:
        impl, state = self._under_way[-1]
        if tensor.device.type == state.device.type and not _is_torchs_own():
            self._found(
                "read", impl, state, f"read from the device with {how}()", _outside() or impl.where
            )

    def _found(self, kind: Kind, impl: Implementation, state: Any, what: str, where: str) -> None:
        origin = impl.origin
        if impl.plugin.role == "core":
            origin = f"the task's {_TASK_INSIDE_CORE[impl.hook.name]}, in {impl.hook.name}"
        moment = f"{moment_in(impl.hook.name, state)}, rank {state.layout.label(state.rank)}"
        finding = self._findings.setdefault(
            (origin, what), Finding(kind, impl.plugin.origin, origin, what, where, moment)
        )
        finding.times += 1


class RecordedState:
    """Wraps the State or a view of it, and reports assignments, logging and requests.

    A wrapper, so that the State of an unchecked run needs no test of whether it is being checked.

    Args:
        report: called with the action, and with the attribute concerned.
        replaced: collects the original value of each assigned attribute instead of reporting it, for
            collections: they may try a batch with `state.call`, and must restore all attributes.
    """

    __slots__ = ("_replaced", "_report", "_state")

    def __init__(
        self,
        state: State,
        report: Callable[[str, Part], None],
        replaced: dict[str, Any] | None = None,
    ) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_report", report)
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        if name in _ACTS and (name != "call" or self._replaced is None):
            self._report("called", Part(name))
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._replaced is None:
            self._report("assigned", Part(name))
        else:
            self._replaced.setdefault(name, getattr(self._state, name))
        setattr(self._state, name, value)


def _only_answers(impl: Implementation) -> bool:
    """Whether a hook must not change anything: a question, or a query of the core about a plugin."""
    is_about_plugin = impl.hook.kind == "collection" and not impl.hook.declared_by
    return is_about_plugin or impl.hook.kind == "question"


def _is_torchs_own() -> bool:
    """Whether torch's own code made the current read, such as an optimizer reading its step count.

    Reads by a tensor's methods, such as `format` or `in`, count as reads of their caller.
    """
    for frame, _ in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((*_OF_TENSORS, "<")):
            return file.startswith(f"{_TORCH}{os.sep}")
    return False


def _outside() -> str:
    """Returns the innermost line on the stack that is neither in torch nor in eventloop.

    The simulated device counts as torch: its methods replace torch's while it is in use.
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
    """Reports every value that is read from a tensor inside its context; may be nested.

    On a CUDA device each read waits until all preceding work is computed; on the CPU no read waits, but
    the same calls are reported.

    Args:
        found: called for each read with the tensor and the kind of read: "item", "tolist", "numpy",
            "print"; "_to_copy" and "copy_" for copies from another device that the host waits for.
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
                    delattr(Tensor, name)  # uncovers the inherited method
                else:
                    setattr(Tensor, name, method)

    def _found_in_torch(self, tensor: Tensor, how: str) -> None:
        if not self._is_reading:  # `tolist` on a device copies first: one read, not two
            self._found(tensor, how)

    def _reporting(self, how: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_reading:  # printing reads every entry
                return method(tensor, *args, **kwargs)
            self._is_reading = True
            try:
                self._found(tensor, how)
                return method(tensor, *args, **kwargs)
            finally:
                self._is_reading = False

        return read


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, report: Callable[[Tensor, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() == _READ:
            self._report(args[0], "item")
        elif (copied := _copied_to_host(func.name(), args, kwargs)) is not None:
            self._report(copied, func.name().removeprefix("aten::"))
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
