"""Edits of `[tool.eventloop]`: a name more or less in a list of plugins; all else stays as it is."""

from __future__ import annotations

from typing import Any

import tomlkit

from eventloop.config.version_ranges import split_requirement
from eventloop.naming import fold

_MARK = "\ufeff"  # some editors of Windows begin a file with it


def with_name(text: str, key: str, name: str) -> str:
    """Returns the file with a name in the list `disable`, `required` or `allow`, which may be new.

    Raises:
        ValueError: the file isn't TOML, or has something else there than a list in a table.
    """
    content = _parsed(text)
    try:
        tool = content.setdefault("tool", tomlkit.table(is_super_table=True))
        tool.setdefault("eventloop", tomlkit.table()).setdefault(key, tomlkit.array()).append(name)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{key} of [tool.eventloop] is not a list in a table") from error
    return _written(content, text)


def without_name(text: str, key: str, name: str) -> str:
    """Returns the file without a name in a list; comments stay.

    Raises:
        ValueError: the file isn't TOML.
    """
    content = _parsed(text)
    listed = content["tool"]["eventloop"][key]
    for idx in reversed([idx for idx, one in enumerate(listed) if _is(one, name)]):
        del listed[idx]
    return _written(content, text)


def has_name(text: str, key: str, name: str) -> bool:
    """Returns whether a list of the table has a name, with versions or without.

    Raises:
        ValueError: the file isn't TOML.
    """
    return any(_is(one, name) for one in names(text, key))


def names(text: str, key: str) -> list[str]:
    """Returns what a list of the table holds.

    Raises:
        ValueError: the file isn't TOML.
    """
    return list(_parsed(text).get("tool", {}).get("eventloop", {}).get(key, ()))


def _is(item: str, name: str) -> bool:
    parts = split_requirement(item)
    return fold(parts[0] if parts else item) == fold(name)


def _parsed(text: str) -> Any:
    return tomlkit.parse(text.removeprefix(_MARK).replace("\r\n", "\n"))


def _written(content: Any, text: str) -> str:
    written: str = content.as_string()
    written = written.replace("\n", "\r\n") if "\r\n" in text else written
    return _MARK * text.startswith(_MARK) + written
