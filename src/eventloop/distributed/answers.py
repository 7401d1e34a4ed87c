"""The questions of the loop, such as `should_skip_batch`, and this rank's answers to them.

All ranks must answer alike. If a rank skips a batch that another rank trains on, gradients of two
batches are averaged, or a collective waits until the timeout, or gloo aborts the process. Different
answers are detected without additional collectives: a digest of all answers is sent with the counts
of a batch, and the answers are part of each rank's record in the store. Before something rare and
slow, such as an evaluation, a rank compares the records right away.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from eventloop.distributed.consistency import DECIDED_ALONE
from eventloop.errors import TaskError
from eventloop.plugin.declared_hooks import HOOKS

if TYPE_CHECKING:
    from eventloop.mesh import Layout
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State

QUESTIONS = tuple(name for name, hook in HOOKS.items() if hook.kind == "question")
# Questions that are rarely answered with True, and then followed by collectives which a rank with
# another answer wouldn't join. Reading the store first costs little compared with an evaluation.
RARE = frozenset(QUESTIONS) - {"should_skip_batch", "should_skip_step"}
# How many answers are recorded. All are part of the rank's record, which is rewritten twice a second.
_MAX_RECORDED = 24
_FORM = re.compile(r"(\d{1,18}) (\d{1,18})((?: \d{1,18}:\d{1,18}:\d{1,2})*)")


@dataclass(frozen=True)
class Difference:
    """A question that ranks have answered differently.

    Args:
        question: the name of the hook.
        batch: the clock's batch count when the question was asked.
        yes: the ranks that answered True.
        no: the ranks that didn't.
    """

    question: str
    batch: int
    yes: tuple[int, ...]
    no: tuple[int, ...]

    def text(self, layout: Layout) -> str:
        """Returns a sentence: "the ranks answered should_eval differently at batch 7: ..."."""
        return (
            f"the ranks answered {self.question} differently at batch {self.batch}: True on "
            f"{_labels(self.yes, layout)}, not on {_labels(self.no, layout)}"
        )


class Answers:
    """Numbers the questions that the loop asks, and records the questions answered with True.

    Attributes:
        digest: a checksum of all answers since `start_digest`, below 2^32.
        confirm: called with the number of each question in `RARE` that was answered with True.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._first_recorded = 0  # the number of the first question whose answer was recorded
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_MAX_RECORDED)
        self.digest = 0
        self.confirm: Callable[[int], None] = _take_for_granted
        self._plugins: Mapping[str, Sequence[str]] = {}

    def record(self, active: ActivePlugins) -> None:
        """Wraps the plans of the questions, so that their answers are recorded.

        Questions that no plugin answers are included, since the numbering must be the same on all
        ranks: a plugin may be active on another rank that has dropped out on this one.
        """
        plugins: dict[str, list[str]] = {}
        for idx, name in enumerate(QUESTIONS):
            recorded = self._recorded(idx, getattr(active.plans, name))
            setattr(active.plans, name, recorded)
            setattr(active.quiet, name, recorded)
            plugins[name] = []
            for implementation in active.assembly.implementations[name]:
                if implementation.plugin.role != "core":
                    plugins[name].append(implementation.plugin.origin)
        self._plugins = plugins

    def plugins_asked(self, question: str) -> str:
        """Returns the names of the plugins, and the task, that answer a question with the core."""
        return ", ".join(self._plugins.get(question, ())) or "only the core"

    def restart(self, number: int) -> None:
        """Restarts the numbering from a number that is the same on all ranks."""
        self._num_asked = self._first_recorded = number
        self._recent.clear()
        self.digest = 0

    def start_digest(self) -> None:
        """Resets the digest; to be called at the same point on all ranks."""
        self.digest = 0

    def __str__(self) -> str:
        # Called by the watchdog's thread, too. The count is read first: an answer that the loop adds in
        # the meantime does no harm, but a question that is counted without its answer reads as "no".
        num_asked = self._num_asked
        while True:
            try:
                recent = tuple(self._recent)
                break
            except RuntimeError:  # the deque was changed while it was copied
                continue
        first_recorded = recent[0][0] if len(recent) == _MAX_RECORDED else self._first_recorded
        events = "".join(f" {number}:{batch}:{idx}" for number, batch, idx in recent)
        return f"{num_asked} {first_recorded}{events}"

    def _recorded(self, idx: int, plan: Callable[..., Any]) -> Callable[..., Any]:
        recent = self._recent
        is_rare = QUESTIONS[idx] in RARE

        def ask(state: State, *arguments: Any) -> Any:
            answer = plan(state, *arguments)
            if answer:
                batch = state.clock.batch
                number = self._num_asked
                recent.append((number, batch, idx))
                self.digest = crc32(b"%d %d" % (number, idx), self.digest)
                self._num_asked += 1
                if is_rare:
                    self.confirm(number)
            else:
                self._num_asked += 1
            return answer

        return ask


def _take_for_granted(_number: int) -> None:
    """Does nothing: without a store there are no records to compare."""


@functools.cache
def answers_of(_pid: int) -> Answers:
    """Returns the answers of a process, numbered consecutively over all its trainers."""
    return Answers()


def difference(texts: Mapping[int, str]) -> Difference | None:
    """Returns the first question that ranks answered differently; None if their records show none.

    Args:
        texts: `str(Answers)` of each rank, from its record.
    """
    records = {rank: record for rank, text in texts.items() if (record := _read(text))}
    numbers = sorted({number for _, _, events in records.values() for number in events})
    for number in numbers:
        yes = []
        no = []
        questions_asked = set()
        for rank, (num_asked, first_recorded, events) in records.items():
            if number in events and first_recorded <= number:
                yes.append(rank)
                questions_asked.add(events[number])
            elif first_recorded <= number < num_asked:
                no.append(rank)
        if len(questions_asked) > 1:
            return None  # the ranks ask different questions by now; their answers can't be compared
        if yes and no:
            ((batch, idx),) = questions_asked
            return Difference(QUESTIONS[idx], batch, tuple(yes), tuple(no))
    return None


def has_answered(text: str, number: int) -> bool:
    """Whether a rank's record includes its answer to a question, by number."""
    record = _read(text)
    return record is None or number < record[0]


def answered_differently(difference: Difference, answers: Answers, layout: Layout) -> TaskError:
    """Returns the error for a question that ranks have answered differently."""
    return TaskError(
        difference.text(layout),
        answered_by=answers.plugins_asked(difference.question),
        fix=f"{DECIDED_ALONE}, or decide by values that are equal on all ranks, such as state.clock",
    )


def _read(text: str) -> tuple[int, int, dict[int, tuple[int, int]]] | None:
    """Parses `str(Answers)`: the number of questions asked, the first one recorded, and the events.

    Returns None for any other text: other processes can write to the store, too.
    """
    if (match := _FORM.fullmatch(text)) is None:
        return None
    events = {}
    for event in match[3].split():
        number, batch, idx = map(int, event.split(":"))
        if idx >= len(QUESTIONS):
            return None
        events[number] = (batch, idx)
    return int(match[1]), int(match[2]), events


def _labels(ranks: Sequence[int], layout: Layout) -> str:
    names = ", ".join(layout.label(rank) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
