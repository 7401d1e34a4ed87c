"""What ranks know of each other through torchrun's store: their attempt, failures, who runs.

Errors are never sent by a collective, which can block forever. The store needs only the process
that hosts it: torchrun's agent, `eventloop --nproc`, or rank 0.

torchrun keeps its store over a restart, with all keys of earlier attempts. Its restart count
doesn't identify an attempt: each machine counts separately, a machine that joins later starts at
0, and a restart because a machine joined isn't counted (torch 2.13). So rank 0 names each attempt,
and continues when every other rank has answered.

Each rank watches two others, by their records: there is a ring on each machine and one over all
ranks, so this is independent of the number of ranks.

Anyone who reaches the store's port can write to it, so records are sealed with the run's token,
their form is checked, and their text is made safe to print when it is read.
"""

from __future__ import annotations

import functools
import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from eventloop.config.value_sources import TIMEOUT_VARIABLE
from eventloop.distributed.answers import (
    Difference,
    answered_differently,
    answers_of,
    difference,
    has_answered,
)
from eventloop.distributed.loopback import host_on_loopback
from eventloop.distributed.process_ends import in_ranks, is_alive, kill_rank, this_machine
from eventloop.distributed.sealed_records import SealedRecords, token_of_run
from eventloop.errors import EventloopError, SettingError
from eventloop.mesh import Layout
from eventloop.safe_text import one_line, plain

Record = TypeVar("Record", "Failure", "Member")

_PATIENCE = timedelta(seconds=4)
_MOST_CHARS = 50_000
_NAME = "eventloop/attempt"
_POLL_STORE_S = 0.02
POLL_S = 0.5
_HEARTBEATS_S = 4 * POLL_S  # for records that others rewrite
_MOST_ASKED = 16  # ranks whose answers are looked at
_STILL_S = 4 * POLL_S  # without a heartbeat: it can't end by itself


@dataclass(frozen=True)
class Failure:
    """A failure that all ranks can read.

    Args:
        line: what happened, and which plugin caused it.
        details: further lines of the report.
        status: the exit status.
        reported_by: the rank that posted it; another one if `rank` can't.
    """

    rank: int
    line: str
    details: str = ""
    status: int = 1
    reported_by: int = -1

    @property
    def report(self) -> str:
        """The lines for stderr."""
        return f"{self.line}\n{self.details}"


@dataclass(frozen=True)
class Member:
    """A rank's last record of itself; rewriting it is its heartbeat.

    Args:
        machine: the machine or container of its process id.
        is_inside: whether it runs something that needs all ranks, so it mustn't exit.
        num_beats: grows while its watchdog runs, and so while its process runs Python.
        line: which line it is at, if it hasn't moved for long or was asked; else "".
        num_batches: how many batches it has begun.
        answers: its answers to the loop's questions, as `Answers` writes them.
    """

    machine: str
    pid: int
    is_inside: bool
    num_beats: int = 0
    line: str = ""
    num_batches: int = 0
    answers: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.machine == this_machine()


class Bulletin:
    """The failure reports of one attempt of a run; a restart by torchrun uses another one.

    Failures are numbered per process: ranks that all raise and continue look for the same next
    number. A rank that continued alone looks for another number than the others.

    Args:
        store: a connection that only this object uses.
        token: a secret of the run's ranks, by which their records are known; "" without one.

    Attributes:
        is_inside: whether this process runs something that needs all ranks.
        has_failed: whether that has ended with an exception.
        num_batches: how many batches this process has begun.
        answers: its answers to the loop's questions.
        layout: how the ranks are arranged, for their names.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, attempt: str, token: str = ""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._records = SealedRecords(store, token)
        self._num_done = 0
        self._attempt = f"eventloop/{attempt}"
        self._num_failures = self._num_beats = 0
        self._beating = threading.Lock()
        self.has_failed = self.is_inside = False
        self.num_batches = 0
        self.answers = answers_of(os.getpid())
        self.layout = Layout({"data": world_size})

    def label(self, rank: int | None = None) -> str:
        """Returns what messages call a rank, this one unless given."""
        return self.layout.label(self.rank if rank is None else rank)

    def post(self, failure: Failure) -> Failure:
        """Posts a failure; returns the one that was posted first, which may be another's."""
        first = self._failure(self._records.write_first(self._key("failure"), _values(failure)))
        if first is None:  # no rank can have posted it
            self.replace(failure)
        return first or failure

    def first_failure(self) -> Failure | None:
        """Returns the first failure posted; None without one."""
        return self._failure(self._records.read(self._key("failure")))

    def claim(self) -> bool:
        """Claims the writing of the failure to stderr; returns whether this rank got it."""
        return bool(self._records.write_first(self._key("teller"), self.rank) == self.rank)

    def set_reported(self) -> None:
        """Records that the failure has been written to stderr."""
        self._records.write(self._key("told"), "yes")

    def is_reported(self) -> bool:
        """Returns whether the failure has been written to stderr."""
        return self._records.read(self._key("told")) is not None

    def replace(self, failure: Failure) -> None:
        """Replaces the report that was posted first."""
        self._records.write(self._key("failure"), _values(failure))

    def enter(self) -> None:
        """Announces that this process enters something that needs all ranks."""
        if self.has_failed:
            self.has_failed = False
            self._num_failures += 1
            # Alike again on all ranks.
            self.num_batches = self._num_failures << 40
            self.answers.restart(self._num_failures << 40)
        self.is_inside = True
        self.beat()

    def leave(self) -> None:
        """Announces that this process has left it, and can exit."""
        self.is_inside = False
        self.beat()

    def beat(self, line: str = "") -> None:
        """Rewrites this rank's record, as a sign that it is running."""
        with self._beating:  # a watchdog's beat mustn't undo what `leave` has just written
            self._num_beats += 1
            facts = (self.is_inside, self._num_beats, line, self.num_batches, str(self.answers))
            member = Member(this_machine(), os.getpid(), *facts)
            self._records.write(self._member_key(self.rank), astuple(member))

    def member(self, rank: int) -> Member | None:
        """Returns a rank's record; None if it has never been inside."""
        member = _record(Member, self._records.read(self._member_key(rank)))
        if member is None or member.pid < 1:
            return None
        return replace(member, line=one_line(member.line))

    def members(self) -> dict[int, Member | None]:
        """Returns the records of all ranks."""
        return {rank: self.member(rank) for rank in range(self.world_size)}

    def difference(self) -> Difference | None:
        """Returns a question of the loop that ranks have answered differently, as their records show."""
        texts = {rank: one.answers for rank, one in self.members().items() if one is not None}
        return difference(texts | {self.rank: str(self.answers)})

    def confirm(self, number: int) -> None:
        """Publishes this rank's answer to a question, and looks at those of other ranks.

        A rank that answered differently publishes it with its next heartbeat. One that is slow isn't
        waited for: its watchdog will see the answers, too.

        Raises:
            TaskError: another rank has answered differently.
        """
        ranks = range(self.world_size)
        if self.world_size > _MOST_ASKED:  # each asks the next one, or rank 0 would wait for all
            ranks = range(self.rank + 1, self.rank + 2)
        texts = {self.rank: str(self.answers)}

        def has_answered_too(rank: int) -> bool:
            member = self.member(rank)
            if member is None:
                return True
            texts[rank] = member.answers
            return has_answered(member.answers, number)

        try:
            self.beat()
            for rank in {rank % self.world_size for rank in ranks} - {self.rank}:
                wait_until(functools.partial(has_answered_too, rank), _HEARTBEATS_S, poll_s=0.002)
            found = self.difference() if difference(texts) is not None else None
        except RuntimeError:  # the store is gone; the watchdog ends this process
            return
        if found is not None:
            raise answered_differently(found, self.answers, self.layout)

    def finish(self) -> None:
        """Announces that this rank has finished."""
        self.leave()
        self._records.write(self._done_key(self.rank), "yes")

    def all_are_done(self) -> bool:
        """Returns whether every rank has finished.

        Rank 0 reads the record of each rank once; the others read one record of rank 0.
        """
        all_key = f"{self._attempt}/all_done"
        if self.rank:
            return self._records.read(all_key) is not None
        while self._num_done < self.world_size:
            if self._records.read(self._done_key(self._num_done)) is None:
                return False
            self._num_done += 1
        self._records.write(all_key, "yes")
        return True

    def part(self) -> None:
        """Disconnects when all ranks have finished; the rank that hosts the store goes last."""
        num_gone = functools.partial(self._store.add, f"{self._attempt}/num_gone")
        if self.rank:
            num_gone(1)
        else:
            wait_until(lambda: num_gone(0) == self.world_size - 1, _PATIENCE.total_seconds())

    def _member_key(self, rank: int) -> str:
        return f"{self._attempt}/member/{rank}"

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{self._num_failures}/{name}"

    def _done_key(self, rank: int) -> str:
        return f"{self._attempt}/done/{rank}"

    def _failure(self, values: Any) -> Failure | None:
        """Returns a failure that was read, safe to print; None unless a rank can have posted it."""
        failure = _record(Failure, values)
        if failure is None or failure.rank not in range(self.world_size):
            return None
        if failure.reported_by not in range(self.world_size) or not 0 < failure.status < 256:
            return None
        return replace(
            failure, line=one_line(failure.line), details=plain(failure.details[:_MOST_CHARS])
        )


def bulletin() -> Bulletin | None:
    """Returns this process's bulletin; None for a single process, or without a reachable store."""
    return _connected(os.getpid()) if in_ranks() else None


def wait_until(
    condition: Callable[[], bool], seconds: float, *, poll_s: float = _POLL_STORE_S
) -> bool:
    """Polls a condition; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(poll_s)
    return is_true


@functools.cache
def _connected(_pid: int) -> Bulletin | None:
    """Connects once per process, as a fork mustn't share its parent's connection."""
    try:
        store = connect(_PATIENCE)
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError, RuntimeError, OSError):
        return None  # the group was made in another way, which tells of no store
    return Bulletin(store, rank, world_size, attempt(), token_of_run())


def _values(failure: Failure) -> list[Any]:
    return [*astuple(replace(failure, details=failure.details[:_MOST_CHARS]))]


def _record(kind: type[Record], values: Any) -> Record | None:
    """Returns a record that was read; None if it hasn't the fields of its kind."""
    types = [_TYPES[str(each.type)] for each in fields(kind)]
    if not isinstance(values, list) or [type(value) for value in values] != types:
        return None
    return kind(*values)


_TYPES = {"int": int, "str": str, "bool": bool}


def neighbours(board: Bulletin) -> list[Neighbour]:
    """Returns the neighbours of this process's rank."""
    rank = board.rank
    world_size = board.world_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    next_here = rank - local_rank + (local_rank + 1) % num_here
    return [Neighbour(board, one) for one in {next_here, (rank + 1) % world_size} - {rank}]


class Neighbour:
    """A rank that is watched, by its record on the board."""

    def __init__(self, board: Bulletin, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._member: Member | None = None
        self._still_s = 0.0
        self._looked_at = time.monotonic()

    @property
    def answers(self) -> dict[int, str]:
        """Its answers to the loop's questions at the last look, by its rank."""
        return {} if self._member is None else {self._rank: self._member.answers}

    def look(self) -> Failure | None:
        """Reads its record; returns a failure if it has ended, or hasn't run for the timeout."""
        member = self._board.member(self._rank)
        previous = self._member
        now = time.monotonic()
        looked_at = self._looked_at
        self._member = member
        self._looked_at = now
        # While this process was stopped itself, its neighbour may have been, too.
        self._still_s = (
            self._still_s + min(now - looked_at, 2 * POLL_S) if member == previous else 0
        )
        if member is None or not member.is_inside:
            return None
        if member.is_here and not _is_running(member.pid):
            return self._gone(member)
        if self._still_s > timeout_s():
            what = f"its process {member.pid} hasn't run for {self._still_s:.0f} s"
            why = "it is stopped, or in a call that holds the GIL"
            return self._failure(f"{what}: {why}")
        return None

    def end_if_still(self) -> None:
        """Kills the rank and its children if it can't exit by itself."""
        member = self._member
        if member is None or not (member.is_inside and member.is_here):
            return
        if self._still_s < _STILL_S or wait_until(
            lambda: self._board.member(self._rank) != member, POLL_S
        ):
            return
        kill_rank(member.pid, self._rank)

    def _gone(self, seen: Member) -> Failure | None:
        member = self._board.member(self._rank)
        if member is None or not member.is_inside:
            return None  # it left in order, between the two looks
        members = self._board.members()
        lines = ((self._board.label(rank), one.line) for rank, one in members.items() if one)
        locations = [f"rank {name} {line}" for name, line in lines if line]
        before = f"; before that: {'; '.join(locations)}" if locations else ""
        what = f"its process {seen.pid} is gone without a word"
        if (found := self._board.difference()) is not None:
            before = f"; before that: {found.text(self._board.layout)}"
        return self._failure(f"{what}{before}")

    def _failure(self, what: str) -> Failure:
        line = f"rank {self._board.label(self._rank)}: {what}"
        return Failure(self._rank, line, reported_by=self._board.rank)


def _is_running(pid: int) -> bool:
    """Returns whether a process is running; a zombie isn't."""
    if not hasattr(os, "pidfd_open"):
        return is_alive(pid)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # not allowed here
        return is_alive(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)


@functools.cache
def attempt() -> str:
    """Returns the name of this attempt, the same on all its ranks; collective in torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_held_by_a_rank():
        return "0"  # no launcher but torchrun starts ranks again; rank 0's store ends with it
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    return agree(connect(timedelta(seconds=timeout_s())), rank, world_size, timeout_s())


def connect(patience: timedelta) -> TCPStore:
    """Connects to the store of these ranks, which torchrun or rank 0 hosts; raises as torch does."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if not _is_held_by_a_rank():
        return TCPStore(host, port, is_master=False, timeout=patience)
    holds = os.environ["RANK"] == "0"
    # torch's own rendezvous finds the store of this process, and shares it.
    seconds = timedelta(seconds=timeout_s())
    if holds:
        host_on_loopback(host, port)
    store = TCPStore(host, port, is_master=holds, multi_tenant=True, timeout=seconds)
    store.set_timeout(patience)
    return store


def _is_held_by_a_rank() -> bool:
    """Returns whether rank 0 hosts the store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"


def is_host_of_store() -> bool:
    """Returns whether this process hosts the store: rank 0 does, unless torchrun's agent does."""
    is_agent_s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("RANK") == "0" and not is_agent_s


def agree(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Returns a name for these ranks that earlier ranks in the same store don't have."""
    end = time.monotonic() + seconds
    records = SealedRecords(store, token_of_run())
    if rank == 0:
        name = f"eventloop/{os.urandom(8).hex()}"
        records.write(_NAME, name)
        while (num_here := 1 + store.add(f"{name}/num_answers", 0)) < world_size:
            _wait(end, seconds, f"{num_here} of {world_size} ranks have started")
        store.set(f"{name}/go", "")
        return name
    name = ""
    while not (name and store.check([f"{name}/go"])):
        _wait(end, seconds, f"rank {rank} waits for rank 0 to start")
        newest = str(records.read(_NAME) or "")
        # The name of an earlier attempt has been answered by that attempt's rank.
        if newest != name and store.add(f"{newest}/answer/{rank}", 1) == 1:
            store.add(f"{newest}/num_answers", 1)
            name = newest
    return name


def _wait(end: float, seconds: float, what: str) -> None:
    if time.monotonic() > end:
        raise EventloopError(
            f"{what}, and no more in {seconds:g} s",
            fix=f"see what the other ranks wrote, or set {TIMEOUT_VARIABLE} to more seconds",
        )
    time.sleep(_POLL_STORE_S)


def timeout_s() -> float:
    """Returns the timeout of collectives in seconds: EVENTLOOP_TIMEOUT_S, by default 1,800."""
    text = os.environ.get(TIMEOUT_VARIABLE) or "1800"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(
            f"{TIMEOUT_VARIABLE}={text!r} isn't a number of seconds",
            fix=f"unset it, or write `{TIMEOUT_VARIABLE}=600`",
        )
    return seconds
