"""`eventloop plugins lock`."""

from __future__ import annotations

import hashlib
import tomllib
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.usefixtures("no_others")


def digest_of(code: str) -> str:
    return f"sha256:{hashlib.sha256(code.encode()).hexdigest()}"


def test_the_lock_is_toml_with_plugins_and_a_digest(run, two, sources_of_two, only):
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
            "files": {"eventloop_aa_test_module.py": digest_of(sources_of_two["aa-test"])},
        },
        {
            "name": "bb-test",
            "role": "algorithm",
            "distribution": "eventloop-bb-test",
            "version": "1.0",
            "files": {"eventloop_bb_test_module.py": digest_of(sources_of_two["bb-test"])},
        },
    ]
    assert locked["eventloop"] == version("torch-eventloop")


def test_a_lock_that_cannot_be_written_is_an_error(run, two, only):
    """Without a traceback, which would be one of ours."""
    (two / "eventloop.lock").mkdir()

    ran = run("plugins", "lock", *only)

    assert ran.status == 2
    assert "eventloop.lock can't be written: Is a directory" in ran.err


def test_a_lock_sees_a_byte_of_code(run, two, sources_of_two, tmp_path, only):
    """The version says nothing of a file that was edited where it is installed."""
    unlocked = run("plugins", "lock", "--check", *only)
    run("plugins", "lock", *only)
    same = run("plugins", "lock", "--check", *only)
    edited = tmp_path / "site" / "eventloop_bb_test_module.py"
    edited.write_text(sources_of_two["bb-test"] + "#")

    ran = run("plugins", "lock", "--check", *only)

    assert (unlocked.status, same.status, ran.status) == (1, 0, 1)
    assert "there is no eventloop.lock" in unlocked.err
    assert "as locked" in same.out
    assert "changed  eventloop_bb_test_module.py of bb-test" in ran.err
    assert tomllib.loads((two / "eventloop.lock").read_text())["plugins"][1]["files"] == {
        "eventloop_bb_test_module.py": digest_of(sources_of_two["bb-test"])
    }


def test_what_would_not_run_is_not_locked(run, install, clean):
    """A lock that nobody can fulfil helps nobody."""
    install("aa-test", "1 / 0")

    ran = run("plugins", "lock")

    assert ran.status == 1
    assert "can't be locked" in ran.err
    assert not (clean / "eventloop.lock").exists()
