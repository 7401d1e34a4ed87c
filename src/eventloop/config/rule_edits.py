"""Edits of `[tool.eventloop]`: a name more or less in a list of plugins; all else stays as it is."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from typing import Any

from eventloop.config.version_ranges import split_requirement
from eventloop.naming import fold

_TABLE = re.compile(r"^[ \t]*\[tool\.eventloop\][ \t]*(#[^\n]*)?$", re.MULTILINE)
_NEXT = re.compile(r"^[ \t]*\[", re.MULTILINE)
_TOKEN = re.compile(r"#[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[\[\]]")


def with_name(text: str, key: str, name: str) -> str:
    """Returns the file with a name in the list `disable`, `required` or `allow`, which may be new.

    Raises:
        ValueError: the table is written in a way that isn't known here.
    """
    end = "\r\n" if "\r\n" in text else "\n"
    item = json.dumps(name)
    listed = _list(text, key)
    table = _TABLE.search(text.replace("\r", " "))  # of the same length
    if listed is not None:
        rest = text[listed[0] :]
        space = rest[: len(rest) - len(rest.lstrip())]
        is_empty, is_comment = rest[len(space)] == "]", rest[len(space)] == "#"
        added = item if is_empty else f"{item}," if is_comment else f"{space}{item},"
        edited = text[: listed[0]] + added + (rest if space or is_empty else f" {rest}")
    elif table is not None:
        head = table.end() - (text[table.end() - 1 : table.end()] == "\r")
        edited = f"{text[:head]}{end}{key} = [{item}]{text[head:]}"
    else:
        gap = "" if not text else end if text.endswith("\n") else end * 2
        edited = f"{text}{gap}[tool.eventloop]{end}{key} = [{item}]{end}"
    return _checked(text, edited, key, [*names(text, key), name])


def without_name(text: str, key: str, name: str) -> str:
    """Returns the file without a name in a list; comments stay.

    Raises:
        ValueError: the table is written in a way that isn't known here.
    """
    kept = [one for one in names(text, key) if not _is(one, name)]
    edited, listed = text, _list(text, key)
    for start, stop in reversed(listed[1] if listed else ()):
        if not _is(tomllib.loads(f"x = {edited[start:stop]}")["x"], name):
            continue
        before, after = edited[:start], edited[stop:]
        follows = re.match(r"[ \t]*,[ \t]*", after)
        if follows:
            after = after[follows.end() :]
        else:
            before = re.sub(r",[ \t]*\Z", "", before)
        line = re.match(r"[ \t]*\r?\n", after)
        if line and before.rstrip(" \t").endswith("\n"):
            before, after = before.rstrip(" \t"), after[line.end() :]
        edited = before + after
    return _checked(text, edited, key, kept)


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
    return list(_table(_parsed(text)).get(key, ()))


def _list(text: str, key: str) -> tuple[int, list[tuple[int, int]]] | None:
    """Returns where a list begins, behind its bracket, and where its items stand; None without one."""
    table = _TABLE.search(text.replace("\r", " "))
    if table is None:
        return None
    following = _NEXT.search(text, table.end())
    section = text[: following.start() if following else len(text)]
    head = re.compile(rf"^[ \t]*{key}[ \t]*=[ \t]*\[", re.MULTILINE).search(section, table.end())
    if head is None:
        return None
    items = []
    for token in _TOKEN.finditer(text, head.end()):
        if token[0] == "]":
            break
        if token[0][0] in "\"'":
            items.append(token.span())
    return head.end(), items


def _is(item: str, name: str) -> bool:
    parts = split_requirement(item)
    return fold(parts[0] if parts else item) == fold(name)


def _checked(text: str, edited: str, key: str, wanted: list[str]) -> str:
    """Returns the edited file, if it says what it should and nothing else has changed."""
    expected = copy.deepcopy(_parsed(text))
    expected.setdefault("tool", {}).setdefault("eventloop", {})[key] = sorted(wanted)
    found = _parsed(edited)
    if key in (table := _table(found)):
        table[key] = sorted(table[key])
    if found != expected:
        raise ValueError(f"{key} is written in a way that isn't known")
    return edited


def _table(content: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = content.get("tool", {}).get("eventloop", {})
    return table


def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text.removeprefix("\ufeff").replace("\r\n", "\n"))
