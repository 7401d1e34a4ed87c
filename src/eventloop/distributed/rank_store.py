"""The bulletin of the ranks in torchrun's store: the attempt, heartbeats and failures.

Errors are never sent by a collective, which can block forever. The store works as long as the process
that hosts it runs: torchrun's agent, `eventloop --nproc`, or rank 0.

torchrun keeps its store over a restart, with all keys of earlier attempts. Its restart count
doesn't identify an attempt: each machine counts separately, a machine that joins later starts at
0, and a restart because a machine joined isn't counted (torch 2.13). So rank 0 names each attempt,
and continues when every other rank has answered.

Each rank watches two others through their records: its neighbours in a ring of the ranks on its
machine and in a ring of all ranks. So the load doesn't grow with the number of ranks.

Any process that reaches the store's port can write to it. So records are sealed with the run's token,
their types are checked, and their text is made safe to print when it is read.
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
_MAX_CHARS = 50_000
_NAME = "eventloop/attempt"
_POLL_STORE_S = 0.02
POLL_S = 0.5
_HEARTBEATS_S = 4 * POLL_S  # how long to wait until other ranks have rewritten their records
_MAX_RANKS_ASKED = 16  # with more ranks, `confirm` looks only at the answers of the next rank
_STILL_S = 4 * POLL_S  # a rank without a heartbeat for this long can't exit on its own


@dataclass(frozen=True)
class Failure:
    """A failure that all ranks can read.

    Args:
        rank: the rank that failed.
        line: the first line of the report: the error, and the plugin that caused it.
        details: further lines of the report.
        status: the exit status.
        reported_by: the rank that posted the failure; not `rank` if that can't report any more.
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
    """The record that a rank writes about itself; rewriting it is the rank's heartbeat.

    Args:
        machine: digest of the machine or container in which `pid` is valid.
        is_inside: whether the rank runs a block that needs all ranks, so that it mustn't exit.
        num_beats: grows while the rank's watchdog runs, which means: while its process runs Python.
        line: the position of the rank, if it hasn't moved for long or was asked for it; else "".
        num_batches: how many batches the rank has begun.
        answers: the rank's answers to the loop's questions, as `str(Answers)`.
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
        """Whether the rank runs on this machine."""
        return self.machine == this_machine()


class Bulletin:
    """The records of one attempt of a run; after a restart by torchrun there is a new bulletin.

    Failures are numbered, and each process counts for itself: ranks that all raise and continue agree
    on the next number. A rank that continues while the others don't would look for another number.

    Args:
        store: a connection that only this object uses.
        attempt: the name of the attempt, the same on all ranks.
        token: a secret of the run's ranks, which seals their records; "" without a secret.

    Attributes:
        is_inside: whether this process runs a block that needs all ranks.
        has_failed: whether that block has raised an exception.
        num_batches: how many batches this process has begun.
        answers: this process's answers to the loop's questions.
        layout: the arrangement of the ranks, which gives them their names in messages.
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
        """Returns the name of a rank in messages; by default of this rank."""
        return self.layout.label(self.rank if rank is None else rank)

    def post(self, failure: Failure) -> Failure:
        """Posts a failure; returns the first failure posted, which may be another rank's."""
        values = self._records.write_first(self._key("failure"), _values(failure))
        first_failure = self._failure(values)
        if first_failure is None:  # malformed, so not posted by a rank
            self.replace(failure)
            return failure
        return first_failure

    def first_failure(self) -> Failure | None:
        """Returns the first failure posted; None if no rank has failed."""
        return self._failure(self._records.read(self._key("failure")))

    def claim(self) -> bool:
        """Claims the task of writing the failure to stderr; returns whether this rank has to do it."""
        return bool(self._records.write_first(self._key("teller"), self.rank) == self.rank)

    def set_reported(self) -> None:
        """Records that the failure has been written to stderr."""
        self._records.write(self._key("told"), "yes")

    def is_reported(self) -> bool:
        """Returns whether the failure has been written to stderr."""
        return self._records.read(self._key("told")) is not None

    def replace(self, failure: Failure) -> None:
        """Replaces the failure that was posted first."""
        self._records.write(self._key("failure"), _values(failure))

    def enter(self) -> None:
        """Announces that this process enters a block that needs all ranks."""
        if self.has_failed:
            self.has_failed = False
            self._num_failures += 1
            # Ranks may have failed after different numbers of batches and questions. A new start far
            # above any count makes them equal again, and keeps them growing.
            self.num_batches = self._num_failures << 40
            self.answers.restart(self._num_failures << 40)
        self.is_inside = True
        self.beat()

    def leave(self) -> None:
        """Announces that this process has left the block, and may exit."""
        self.is_inside = False
        self.beat()

    def beat(self, line: str = "") -> None:
        """Rewrites this rank's record, which shows the other ranks that it is running."""
        with self._beating:  # a watchdog's beat mustn't undo what `leave` has just written
            self._num_beats += 1
            member = Member(
                machine=this_machine(),
                pid=os.getpid(),
                is_inside=self.is_inside,
                num_beats=self._num_beats,
                line=line,
                num_batches=self.num_batches,
                answers=str(self.answers),
            )
            self._records.write(self._member_key(self.rank), astuple(member))

    def member(self, rank: int) -> Member | None:
        """Returns the record of a rank; None if the rank has never entered a block."""
        member = _record(Member, self._records.read(self._member_key(rank)))
        if member is None or member.pid < 1:
            return None
        return replace(member, line=one_line(member.line))

    def members(self) -> dict[int, Member | None]:
        """Returns the records of all ranks."""
        return {rank: self.member(rank) for rank in range(self.world_size)}

    def difference(self) -> Difference | None:
        """Returns the first question of the loop that ranks have answered differently, or None."""
        members = self.members().items()
        texts = {rank: member.answers for rank, member in members if member is not None}
        return difference(texts | {self.rank: str(self.answers)})

    def confirm(self, number: int) -> None:
        """Publishes this rank's answer to a question, and compares the answers of other ranks.

        A rank that answered differently publishes its answer with its next heartbeat. A slow rank isn't
        waited for: its watchdog will compare the answers, too.

        Args:
            number: the number of the question, as `Answers` counts them.

        Raises:
            TaskError: another rank has answered differently.
        """
        asked_ranks = set(range(self.world_size)) - {self.rank}
        if self.world_size > _MAX_RANKS_ASKED:
            # Each rank asks the next rank: asking all would take as many reads as there are ranks.
            asked_ranks = {(self.rank + 1) % self.world_size}
        texts = {self.rank: str(self.answers)}

        def has_answered_too(rank: int) -> bool:
            member = self.member(rank)
            if member is None:
                return True
            texts[rank] = member.answers
            return has_answered(member.answers, number)

        try:
            self.beat()
            for rank in asked_ranks:
                wait_until(functools.partial(has_answered_too, rank), _HEARTBEATS_S, poll_s=0.002)
            different = self.difference() if difference(texts) is not None else None
        except RuntimeError:  # the store is gone; the watchdog ends this process
            return
        if different is not None:
            raise answered_differently(different, self.answers, self.layout)

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
        """Announces that this rank no longer needs the store; rank 0, which may host it, goes last."""
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
        """Returns a failure from the store, with text safe to print; None if its values are invalid."""
        failure = _record(Failure, values)
        if failure is None or failure.rank not in range(self.world_size):
            return None
        if failure.reported_by not in range(self.world_size) or not 0 < failure.status < 256:
            return None
        return replace(
            failure, line=one_line(failure.line), details=plain(failure.details[:_MAX_CHARS])
        )


def bulletin() -> Bulletin | None:
    """Returns the bulletin of this process; None for a single process, or if no store is reachable."""
    return _connected(os.getpid()) if in_ranks() else None


def wait_until(
    condition: Callable[[], bool], seconds: float, *, poll_s: float = _POLL_STORE_S
) -> bool:
    """Polls a condition for up to `seconds`; returns whether it became true."""
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
        return None  # the process group was created without the environment variables of a store
    return Bulletin(store, rank, world_size, attempt(), token_of_run())


def _values(failure: Failure) -> list[Any]:
    return [*astuple(replace(failure, details=failure.details[:_MAX_CHARS]))]


def _record(kind: type[Record], values: Any) -> Record | None:
    """Returns a record from values in the store; None unless they have the types of its fields."""
    types = [_TYPES[str(field.type)] for field in fields(kind)]
    if not isinstance(values, list) or [type(value) for value in values] != types:
        return None
    return kind(*values)


# Annotations are strings in this module (`from __future__ import annotations`).
_TYPES = {"int": int, "str": str, "bool": bool}


def neighbours(board: Bulletin) -> list[Neighbour]:
    """Returns the next ranks in the ring of this machine and in the ring of all ranks."""
    rank = board.rank
    world_size = board.world_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    next_here = rank - local_rank + (local_rank + 1) % num_here
    next_ranks = {next_here, (rank + 1) % world_size} - {rank}
    return [Neighbour(board, next_rank) for next_rank in next_ranks]


class Neighbour:
    """A rank that this rank watches through its record on the board."""

    def __init__(self, board: Bulletin, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._member: Member | None = None
        self._still_s = 0.0
        self._looked_at = time.monotonic()

    @property
    def answers(self) -> dict[int, str]:
        """The neighbour's answers at the last look, by its rank; {} before it has a record."""
        return {} if self._member is None else {self._rank: self._member.answers}

    def look(self) -> Failure | None:
        """Reads the neighbour's record; returns a failure if it has ended, or stood still for the timeout."""
        member = self._board.member(self._rank)
        previous_member = self._member
        current_time = time.monotonic()
        seconds_since_look = current_time - self._looked_at
        self._member = member
        self._looked_at = current_time
        if member == previous_member:
            # Limited, since this process may have been stopped itself, and its neighbour with it.
            self._still_s += min(seconds_since_look, 2 * POLL_S)
        else:
            self._still_s = 0.0
        if member is None or not member.is_inside:
            return None
        if member.is_here and not _is_running(member.pid):
            return self._gone(member)
        if self._still_s > timeout_s():
            return self._failure(
                f"its process {member.pid} hasn't run for {self._still_s:.0f} s: it is stopped, or in "
                "a call that holds the GIL"
            )
        return None

    def end_if_still(self) -> None:
        """Kills the neighbour and its child processes if it can't exit on its own."""
        member = self._member
        if member is None or not (member.is_inside and member.is_here):
            return
        if self._still_s < _STILL_S:
            return
        if wait_until(lambda: self._board.member(self._rank) != member, POLL_S):
            return  # a heartbeat has come
        kill_rank(member.pid, self._rank)

    def _gone(self, last_member: Member) -> Failure | None:
        """Returns the failure of a neighbour whose process has ended; None if it ended normally."""
        member = self._board.member(self._rank)
        if member is None or not member.is_inside:
            return None  # it left the block after its record was read
        problem = f"its process {last_member.pid} ended without reporting an error"
        if (different := self._board.difference()) is not None:
            return self._failure(f"{problem}; before that: {different.text(self._board.layout)}")
        positions = []
        for rank, member in self._board.members().items():
            if member is not None and member.line:
                positions.append(f"rank {self._board.label(rank)} {member.line}")
        if positions:
            problem += f"; before that: {'; '.join(positions)}"
        return self._failure(problem)

    def _failure(self, problem: str) -> Failure:
        line = f"rank {self._board.label(self._rank)}: {problem}"
        return Failure(self._rank, line, reported_by=self._board.rank)


def _is_running(pid: int) -> bool:
    """Returns whether a process is running; a zombie isn't."""
    if not hasattr(os, "pidfd_open"):
        return is_alive(pid)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # forbidden, as in some containers
        return is_alive(pid)
    try:
        poll = select.poll()
        # The descriptor becomes readable when the process ends, even if no parent waits for it.
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)


@functools.cache
def attempt() -> str:
    """Returns the name of this attempt, the same on all its ranks. Collective under torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_hosted_by_rank_0():
        return "0"  # only torchrun restarts ranks, and a store of rank 0 doesn't outlive an attempt
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    return agree(connect(timedelta(seconds=timeout_s())), rank, world_size, timeout_s())


def connect(patience: timedelta) -> TCPStore:
    """Connects to the store of the ranks, which torchrun or rank 0 hosts.

    Args:
        patience: how long to wait for torchrun's store, and later for each read.

    Raises:
        RuntimeError: the store can't be reached in time (torch's DistNetworkError and others).
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if not _is_hosted_by_rank_0():
        return TCPStore(host, port, is_master=False, timeout=patience)
    is_host = os.environ["RANK"] == "0"
    timeout = timedelta(seconds=timeout_s())
    if is_host:
        host_on_loopback(host, port)
    # With `multi_tenant` the rendezvous of torch in this process shares the server of this store.
    store = TCPStore(host, port, is_master=is_host, multi_tenant=True, timeout=timeout)
    store.set_timeout(patience)
    return store


def _is_hosted_by_rank_0() -> bool:
    """Returns whether rank 0 hosts the store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"


def is_host_of_store() -> bool:
    """Returns whether this process hosts the store: rank 0 does, unless torchrun's agent does."""
    is_agent_s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("RANK") == "0" and not is_agent_s


def agree(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Returns a name for this attempt that differs from those of earlier attempts in the store.

    Collective: rank 0 proposes a name, and continues when every other rank has answered it.

    Raises:
        EventloopError: a rank is missing after `seconds`.
    """
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
        newest_name = str(records.read(_NAME) or "")
        # The name may still be an earlier attempt's, which that attempt's rank has answered already.
        if newest_name != name and store.add(f"{newest_name}/answer/{rank}", 1) == 1:
            store.add(f"{newest_name}/num_answers", 1)
            name = newest_name
    return name


def _wait(end: float, seconds: float, progress: str) -> None:
    if time.monotonic() > end:
        raise EventloopError(
            f"{progress}, and no more in {seconds:g} s",
            fix=f"check the output of the other ranks, or set {TIMEOUT_VARIABLE} to more seconds",
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
