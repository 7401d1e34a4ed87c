"""Makes text from any source safe to print on a terminal."""

from __future__ import annotations

import shlex
import unicodedata

MOST_CHARS = 2_000


def plain(text: str, most_chars: int = MOST_CHARS) -> str:
    r"""Returns text whose lines are short enough to read and hold no control characters.

    Those are written as in Python, `\x1b`; so are the ones that hide, join or turn text around.
    Tabs and ends of lines stay.

    Args:
        most_chars: how long a line may be; of a longer one the middle is left out.
    """
    return "\n".join(_line(line, most_chars) for line in text.split("\n"))


def one_line(text: str, most_chars: int = MOST_CHARS) -> str:
    """Returns what `plain` gives, as one line: its ends of lines and tabs are written, too."""
    return plain(text.replace("\n", "\\n").replace("\t", "\\t"), most_chars)


def _line(line: str, most_chars: int) -> str:
    if len(line) > most_chars:
        half = most_chars // 2
        left_out = f"... ({len(line) - 2 * half:,} characters) ..."
        line = f"{line[:half]}{left_out}{line[-half:]}"
    if line.isprintable():
        return line
    return "".join(char if _is_plain(char) else _escaped(char) for char in line)


def _is_plain(char: str) -> bool:
    return char.isprintable() or char == "\t" or unicodedata.category(char) == "Zs"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


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
