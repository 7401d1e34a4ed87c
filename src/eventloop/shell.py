"""Commands that messages propose, safe to paste whatever packages, plugins and paths are called."""

from __future__ import annotations

import shlex

from eventloop.text import one_line


def shell(*words: str) -> str:
    """Returns a command between backticks, safe to paste whatever its words hold.

    What isn't printed is written as in Python, so that one line stays one. A word that isn't the
    first but begins as an option does, without being one of ours, is for the caller to keep out.
    """
    return f"`{' '.join(shlex.quote(one_line(word)) for word in words)}`"


def switch_off(name: str) -> str:
    """Returns the flag that switches a plugin off, between backticks."""
    return shell("-p", f"no:{name}")


def pip(action: str, *requirements: str) -> str:
    """Returns a command of pip's between backticks; no requirement is taken for an option."""
    guard = ("--",) if any(one.startswith("-") for one in requirements) else ()
    return shell("pip", *action.split(), *guard, *requirements)
