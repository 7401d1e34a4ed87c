"""The signatures of all hooks are as they were written down: plugins are built on them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from eventloop.actions import Actions
from eventloop.events import Events
from eventloop.plugin.declared_hooks import HOOKS

FILE = Path(__file__).with_name("hook_signatures.txt")


def signatures() -> str:
    """Returns a line a hook: kind, how often, signature, what it closes."""
    lines = []
    for name, hook in HOOKS.items():
        function = getattr(Events, name, None) or getattr(Actions, name)
        signature = str(inspect.signature(function)).replace("'", "")
        closes = f"  closes {hook.closes}" if hook.closes else ""
        lines.append(f"{hook.kind}, per {hook.per}: {name}{signature}{closes}\n")
    return "".join(lines)


def test_no_signature_has_changed():
    """Add to the State instead; a change breaks every plugin that implements the hook.

    Where it is meant: `python tests/test_hooks_signatures.py`, and a line in the changelog.
    """
    assert signatures() == FILE.read_text()


def test_every_hook_takes_the_state_first():
    """New data goes onto the State, so that signatures can stay."""
    assert {hook.argnames[0] for hook in HOOKS.values()} == {"state"}


if __name__ == "__main__":
    sys.exit(FILE.write_text(signatures()) == 0)
