"""Reads untrusted YAML in bounded time and memory; duplicate keys are an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml  # type: ignore[import-untyped]

_MAX_LEVELS = 50
_MAX_EXPANDED = 2**18  # characters, with every alias replaced by its content
_MAX_DIGITS = 400
# Texts such as 010 and 1:30, which YAML 1.1 would read as the numbers 8 and 90.
_OCTAL_OR_TIME = re.compile(r"[-+]?0[0-7_]+|[^:]+:.*")
_SPECIAL_KEYS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class YamlTextError(ValueError):
    """The text isn't valid YAML, or exceeds the bounds; the message has line and column."""


def load_yaml(text: str) -> Any:
    """Parses YAML text; Python tags aren't supported.

    Args:
        text: should be limited in length, which bounds the time.

    Raises:
        YamlTextError: the text isn't YAML, has a duplicate key, is nested too deeply, or is too large
            with its aliases expanded.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlTextError(f"{position}{problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError for a date such as 2026-02-30
        raise YamlTextError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Composes nodes within bounds on their depth, and on their size with aliases expanded.

    A few lines of nested aliases, a "billion laughs" file, would otherwise expand to gigabytes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        # The expanded size and depth of each node that is complete.
        self._num_chars: dict[Any, int] = {}
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
        elif node not in self._num_chars:  # the alias is within its own node, which isn't complete
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
            return self.DEFAULT_SCALAR_TAG  # text; `_measure` refuses longer numbers
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
        """Records the expanded size and depth of a node, from those of its children."""
        if isinstance(node, yaml.ScalarNode):
            is_number = node.tag.rpartition(":")[2] in ("int", "float")
            if is_number and len(node.value) > _MAX_DIGITS:
                raise _refused(f"a number of {len(node.value):,} characters", node.start_mark)
            self._num_chars[node] = 1 + len(node.value)
            self._num_levels[node] = 1
            return
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for key_and_value in node.value for child in key_and_value]
        self._num_chars[node] = 1 + sum(self._num_chars[child] for child in children)
        self._num_levels[node] = 1 + max((self._num_levels[child] for child in children), default=0)


def _refused(problem: str, mark: Any) -> Exception:
    error: Exception = yaml.composer.ComposerError(None, None, problem, mark)
    return error
