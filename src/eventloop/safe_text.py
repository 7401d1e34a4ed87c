"""Makes text from any source safe to print: no control characters, no endless lines."""

from __future__ import annotations

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
    """Returns text as one line that is safe to print: ends of lines and tabs are written, too."""
    return plain(text.replace("\n", "\\n").replace("\t", "\\t"), most_chars)


def _line(line: str, most_chars: int) -> str:
    if len(line) > most_chars:
        half = most_chars // 2
        left_out = f"... ({len(line) - 2 * half:,} characters) ..."
        line = f"{line[:half]}{left_out}{line[-half:]}"
    if line.isprintable():
        return line
    return "".join(
        char
        if char.isprintable() or char == "\t" or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in line
    )
