"""A mapping as callbacks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class ReadOnlyMapping(Mapping[str, Any]):
    """A mapping that refuses item assignment, nested ones included.

    Args:
        name: how it is reached: `state.eval_metrics`.
        refuse: makes the error of what was tried.
    """

    __slots__ = ("_mapping", "_name", "_refuse")

    def __init__(
        self, mapping: Mapping[str, Any], name: str, refuse: Callable[[str], Exception]
    ) -> None:
        self._mapping = mapping
        self._name = name
        self._refuse = refuse

    def __getitem__(self, key: str) -> Any:
        value = self._mapping[key]
        if type(value) is dict:
            return ReadOnlyMapping(value, f"{self._name}[{key!r}]", self._refuse)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __repr__(self) -> str:
        return repr(self._mapping)

    def __setitem__(self, key: str, value: object) -> None:
        raise self._refuse(f"a callback assigned {self._name}[{key!r}], but it may only read")

    def __delitem__(self, key: str) -> None:
        raise self._refuse(f"a callback deleted {self._name}[{key!r}], but it may only read")
