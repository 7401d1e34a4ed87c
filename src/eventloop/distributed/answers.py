"""The loop's questions and their answers on this rank, which all ranks must answer alike.

A question that is answered differently, `should_skip_batch` say, has one rank compute what another
one skips: gradients of two batches are averaged, or a collective waits until the timeout, or gloo
aborts the process. Ranks find it without a collective of their own: a digest of all answers travels
with the counts of a batch, and the answers stand in each rank's record in the store. Before what is
rare and takes long, an evaluation say, a rank looks there.
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
# What follows these has collectives that other ranks wouldn't join. They are rarely True: a look at
# the store before costs less than what follows.
RARE = frozenset(QUESTIONS) - {"should_skip_batch", "should_skip_step"}
# Answers that are kept; each stands in the rank's record, which is rewritten twice a second.
_MOST = 24
_FORM = re.compile(r"(\d{1,18}) (\d{1,18})((?: \d{1,18}:\d{1,18}:\d{1,2})*)")


@dataclass(frozen=True)
class Difference:
    """A question that ranks have answered differently.

    Args:
        question: the name of the hook.
        batch: the clock's batch count when it was asked.
        yes: the ranks that answered True.
        no: the ranks that didn't.
    """

    question: str
    batch: int
    yes: tuple[int, ...]
    no: tuple[int, ...]

    def text(self, layout: Layout) -> str:
        """Returns the difference in words: "ranks answered should_eval differently ..."."""
        yes, no = (_listed(ranks, layout) for ranks in (self.yes, self.no))
        return (
            f"the ranks answered {self.question} differently at batch {self.batch}: True on {yes}, "
            f"not on {no}"
        )


class Answers:
    """Numbers the questions that the loop asks, and keeps those that were answered with True.

    Attributes:
        digest: of all answers since `start_digest`, below 2^32.
        confirm: called with the number of a question in `RARE` that was answered with True.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._since = 0  # the number of the first question whose answer is known
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_MOST)
        self.digest = 0
        self.confirm: Callable[[int], None] = _take_for_granted
        self._plugins: Mapping[str, Sequence[str]] = {}

    def record(self, active: ActivePlugins) -> None:
        """Wraps the plans of the questions, so that their answers are recorded.

        Also of those that no plugin answers: on another rank a plugin may have dropped out.
        """
        for idx, name in enumerate(QUESTIONS):
            recorded = self._recorded(idx, getattr(active.plans, name))
            setattr(active.plans, name, recorded)
            setattr(active.quiet, name, recorded)
        self._plugins = {
            name: [one.plugin.origin for one in active.assembly.implementations[name]
                   if one.plugin.role != "core"]
            for name in QUESTIONS
        }  # fmt: skip

    def plugins_asked(self, question: str) -> str:
        """Returns the plugins, and the task, that answer a question besides the core."""
        return ", ".join(self._plugins.get(question, ())) or "none besides the core"

    def restart(self, number: int) -> None:
        """Starts again from a number that is the same on all ranks."""
        self._num_asked = self._since = number
        self._recent.clear()
        self.digest = 0

    def start_digest(self) -> None:
        """Starts the digest again; called at the same point on all ranks."""
        self.digest = 0

    def __str__(self) -> str:
        # In this order: answers that the loop adds meanwhile do no harm, missing ones would.
        num_asked = self._num_asked
        while True:
            try:
                recent = tuple(self._recent)
                break
            except RuntimeError:  # the loop has just added one
                continue
        since = recent[0][0] if len(recent) == _MOST else self._since
        events = "".join(f" {number}:{batch}:{idx}" for number, batch, idx in recent)
        return f"{num_asked} {since}{events}"

    def _recorded(self, idx: int, plan: Callable[..., Any]) -> Callable[..., Any]:
        recent = self._recent
        is_rare = QUESTIONS[idx] in RARE

        def ask(state: State, *rest: Any) -> Any:
            answer = plan(state, *rest)
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
    """Confirms nothing, where ranks have no store."""


@functools.cache
def answers_of(_pid: int) -> Answers:
    """Returns the answers of a process, with one numbering for all its trainers."""
    return Answers()


def difference(texts: Mapping[int, str]) -> Difference | None:
    """Returns the first question that ranks answered differently, as far as their records show.

    Args:
        texts: `str(Answers)` of each rank, as its record has it.
    """
    records = {rank: record for rank, text in texts.items() if (record := _read(text))}
    numbers = sorted({number for _, _, events in records.values() for number in events})
    for number in numbers:
        knowing = {
            rank: events.get(number)
            for rank, (num_asked, since, events) in records.items()
            if since <= number and (number < num_asked or number in events)
        }
        given = {event for event in knowing.values() if event is not None}
        if len(given) > 1:
            return None  # they ask other questions by now, for a reason that isn't known
        yes = tuple(rank for rank, event in knowing.items() if event is not None)
        no = tuple(rank for rank, event in knowing.items() if event is None)
        if yes and no:
            ((batch, idx),) = given
            return Difference(QUESTIONS[idx], batch, yes, no)
    return None


def has_answered(text: str, number: int) -> bool:
    """Returns whether a rank's record has its answer to a question."""
    record = _read(text)
    return record is None or number < record[0]


def answered_differently(found: Difference, answers: Answers, layout: Layout) -> TaskError:
    """Returns the error for a question that ranks have answered differently."""
    return TaskError(
        found.text(layout),
        answered_by=answers.plugins_asked(found.question),
        fix=f"{DECIDED_ALONE}, or answer by what all ranks know alike: state.clock, say",
    )


def _read(text: str) -> tuple[int, int, dict[int, tuple[int, int]]] | None:
    if (match := _FORM.fullmatch(text)) is None:
        return None
    events = {}
    for event in match[3].split():
        number, batch, idx = map(int, event.split(":"))
        if idx >= len(QUESTIONS):
            return None
        events[number] = (batch, idx)
    return int(match[1]), int(match[2]), events


def _listed(ranks: Sequence[int], layout: Layout) -> str:
    names = ", ".join(layout.label(rank) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
