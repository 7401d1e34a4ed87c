"""Reads untrusted YAML in bounded time and memory; duplicate keys are an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml  # type: ignore[import-untyped]

_MAX_LEVELS = 50
_MAX_EXPANDED = 2**18  # characters, every alias written out
_MAX_DIGITS = 400
# YAML 1.1 would read them as 8 and as 90.
_OCTAL_OR_TIME = re.compile(r"[-+]?0[0-7_]+|[^:]+:.*")
_SPECIAL_KEYS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class YamlTextError(ValueError):
    """The text isn't YAML, or uses unsupported features; the message has the line."""


def load_yaml(text: str) -> Any:
    """Parses YAML text; Python tags aren't supported.

    Args:
        text: its length bounds the time.

    Raises:
        YamlTextError: it isn't YAML, has a duplicate key, is nested too deeply, or has aliases that
            repeat too much.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(one for one in (error.context, error.problem) if one)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlTextError(f"{where}{said}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 30th of February
        raise YamlTextError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Composes nodes with bounds on their depth and on their size with aliases expanded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._num_chars: dict[Any, int] = {}  # of each node, by the node itself
        self._num_levels: dict[Any, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark = event.start_mark
        if self._level == _MAX_LEVELS:
            raise _refused(f"it is nested more than {_MAX_LEVELS} levels deep", mark)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._measure(node)
        elif node not in self._num_chars:
            raise _refused("an alias contains itself", mark)
        if self._level + self._num_levels[node] > _MAX_LEVELS:
            raise _refused(f"it is nested more than {_MAX_LEVELS} levels deep", mark)
        if self._num_chars[node] > _MAX_EXPANDED:
            raise _refused(
                f"with its aliases written out it has more than {_MAX_EXPANDED:,} characters", mark
            )
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        is_number = kind is yaml.ScalarNode and tag.rpartition(":")[2] in ("int", "float")
        if is_number and len(value) <= _MAX_DIGITS and _OCTAL_OR_TIME.fullmatch(value):
            return self.DEFAULT_SCALAR_TAG  # a longer one is refused
        return tag

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if key.tag in _SPECIAL_KEYS:
                continue
            name = self.construct_object(key, deep=True)
            mark = key.start_mark
            if not isinstance(name, Hashable):
                raise _refused("a key is neither text nor a number", mark)
            if name in lines:
                raise _refused(f"{name!r} is given twice, first in line {lines[name]}", mark)
            lines[name] = mark.line + 1
        result: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return result

    def _measure(self, node: Any) -> None:
        if isinstance(node, yaml.ScalarNode):
            is_number = node.tag.rpartition(":")[2] in ("int", "float")
            if is_number and len(node.value) > _MAX_DIGITS:
                raise _refused(f"a number of {len(node.value):,} characters", node.start_mark)
            self._num_chars[node] = 1 + len(node.value)
            self._num_levels[node] = 1
            return
        pairs = isinstance(node, yaml.MappingNode)
        parts = [one for pair in node.value for one in pair] if pairs else node.value
        self._num_chars[node] = 1 + sum(self._num_chars[one] for one in parts)
        self._num_levels[node] = 1 + max((self._num_levels[one] for one in parts), default=0)


def _refused(problem: str, mark: Any) -> Exception:
    error: Exception = yaml.composer.ComposerError(None, None, problem, mark)
    return error
