"""`eventloop plugins lock`."""

from __future__ import annotations

import hashlib
import tomllib
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.usefixtures("no_others")

HEAD = "from eventloop import hookimpl\n"
AA = (
    HEAD
    + '''
class Plugin:
    """Does a thing.

    Args:
        alpha: how much of it.
    """

    def __init__(self, *, alpha: float = 0.4, beta: int = 1): pass

    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield)

    @hookimpl(tryfirst=True)
    def batch_end(self, state): pass
'''
)
BB = (
    HEAD
    + """
class Plugin:
    @hookimpl(after="aa-test")
    def batch_end(self, state): pass

    @hookimpl
    def loss(self, state): return 1
"""
)


def digest_of(code: str) -> str:
    return f"sha256:{hashlib.sha256(code.encode()).hexdigest()}"


@pytest.fixture
def two(install, clean):
    """Two plugins that meet in two hooks."""
    install("aa-test", AA)
    install("bb-test", BB)
    return clean


def test_the_lock_is_toml_with_plugins_and_a_digest(run, two, only):
    """It stands beside pyproject.toml, and is read by people and programs."""
    below = two / "deep"
    below.mkdir()

    ran = run("plugins", "lock", "--aa-test.alpha", "0.2", *only)
    locked = tomllib.loads((two / "eventloop.lock").read_text())

    assert ran.status == 0, ran.err
    assert locked["order"].startswith("sha256:")
    assert locked["plugins"] == [
        {
            "name": "aa-test",
            "role": "algorithm",
            "distribution": "eventloop-aa-test",
            "version": "1.0",
            "options": {"alpha": 0.2},
            "files": {"eventloop_aa_test_module.py": digest_of(AA)},
        },
        {
            "name": "bb-test",
            "role": "algorithm",
            "distribution": "eventloop-bb-test",
            "version": "1.0",
            "files": {"eventloop_bb_test_module.py": digest_of(BB)},
        },
    ]
    assert locked["eventloop"] == version("torch-eventloop")


def test_a_lock_that_cannot_be_written_is_an_error(run, two, only):
    """Without a traceback, which would be one of ours."""
    (two / "eventloop.lock").mkdir()

    ran = run("plugins", "lock", *only)

    assert ran.status == 2
    assert "eventloop.lock can't be written: Is a directory" in ran.err


def test_a_lock_sees_a_byte_of_code(run, two, tmp_path, only):
    """The version says nothing of a file that was edited where it is installed."""
    unlocked = run("plugins", "lock", "--check", *only)
    run("plugins", "lock", *only)
    same = run("plugins", "lock", "--check", *only)
    (tmp_path / "site" / "eventloop_bb_test_module.py").write_text(BB + "#")

    ran = run("plugins", "lock", "--check", *only)

    assert (unlocked.status, same.status, ran.status) == (1, 0, 1)
    assert "there is no eventloop.lock" in unlocked.err
    assert "as locked" in same.out
    assert "changed  eventloop_bb_test_module.py of bb-test" in ran.err
    assert tomllib.loads((two / "eventloop.lock").read_text())["plugins"][1]["files"] == {
        "eventloop_bb_test_module.py": digest_of(BB)
    }


def test_what_would_not_run_is_not_locked(run, install, clean):
    """A lock that nobody can fulfil helps nobody."""
    install("aa-test", "1 / 0")

    ran = run("plugins", "lock")

    assert ran.status == 1
    assert "can't be locked" in ran.err
    assert not (clean / "eventloop.lock").exists()
