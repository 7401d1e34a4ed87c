"""The project's tests use the fixtures that it offers to others, installed or not; many are nightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# At the end: an installed one comes first.
sys.path.extend(
    str(Path(__file__).parent / "plugins" / one / "src")
    for one in ("eventloop-check", "eventloop-checkpoints", "eventloop-testing")
)

pytest_plugins = ["eventloop_testing.commands", "eventloop_testing.plugin"]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a test that is `sampled(N)` as nightly, but one in N."""
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and case_of(item) % mark.args[0]:
            item.add_marker(pytest.mark.nightly)


def case_of(item: pytest.Item) -> int:
    """Returns the sum of the indices of a case among the values of each `parametrize`.

    So that one in N cases has other values of each, whichever cases are collected.
    """
    indices = item.callspec.indices  # type: ignore[attr-defined]
    names = (mark.args[0] for mark in item.iter_markers("parametrize"))
    firsts = (one.split(",")[0].strip() if isinstance(one, str) else one[0] for one in names)
    return sum(indices[one] for one in firsts)
