"""One rank fails: the others end soon after, and the first line is about the one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.cli import main

BOUND_S = 10
FAILING = '''
from pathlib import Path

from eventloop import Event, hookimpl
from eventloop.plugin.assembly import HOOKS
from eventloop.testing import tiny_task

KINDS = {"Exception": Exception, "KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}


class Fails:
    """Raises in one hook on one rank.

    Args:
        hook: which.
        kind: what.
        rank: where.
    """

    def __init__(self, *, hook: str, kind: str = "Exception", rank: int = 1) -> None:
        self.hook, self.kind, self.rank = hook, kind, rank

    def fail(self, state):
        if state.rank == self.rank:
            Path("raised").touch()
            raise KINDS[self.kind]("on purpose")


def failing(hook):
    def plain(self, state):
        if self.hook == hook:
            self.fail(state)
        elif self.hook in ("exception", "close") and hook == "batch_end":
            self.fail(state)
    return plain


for hook in Event:
    setattr(Fails, str(hook), hookimpl(failing(str(hook))))


class Loud:
    """Listens to what is logged."""

    @hookimpl
    def log(self, state, numbers):
        pass


def task():
    made = tiny_task(callbacks=[Loud()])
    made.settings |= {"device": "cpu", "max_duration": "2ep"}
    return made
'''


@pytest.fixture
def fit_failing(clean, end_ranks):
    """Runs `eventloop fit` on two ranks, with a plugin that raises."""
    (clean / "failing.py").write_text(FAILING)

    def fit_failing(hook, kind, rank):
        options = ["--fails.hook", hook, "--fails.kind", kind, "--fails.rank", str(rank)]
        command = ["fit", "failing.py", "--no-plugins", "-p", "./failing.py:Fails", *options]
        ended = end_ranks(main, command)
        return ended.statuses, ended.err, ended.at - Path("raised").stat().st_mtime

    return fit_failing


@pytest.mark.parametrize(
    ("hook", "kind", "rank"),
    [
        ("init", "SystemExit", 0),
        ("after_load", "KeyboardInterrupt", 1),
        ("fit_start", "Exception", 1),
        ("batch_start", "SystemExit", 1),
        ("after_backward", "KeyboardInterrupt", 0),
        ("log", "Exception", 0),
        ("eval_batch_end", "Exception", 1),
        ("fit_end", "SystemExit", 0),
        ("exception", "KeyboardInterrupt", 1),
        ("close", "Exception", 0),
    ],
)
def test_a_plugin_that_fails_on_one_rank_ends_all_and_is_named(hook, kind, rank, fit_failing):
    """Whatever it raises and wherever; nobody is left to wait in a collective."""
    statuses, err, took_s = fit_failing(hook, kind, rank)

    where = "batch_end" if hook in ("exception", "close") else hook
    first, *_ = err.splitlines()
    assert first.startswith(f"rank {rank}: {kind}: on purpose; raised by plugin fails")
    assert f" in {where}, epoch" in first
    assert err.count(first) == 1
    assert 0 not in statuses
    assert took_s < BOUND_S
