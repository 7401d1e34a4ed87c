"""The project's tests use the fixtures that it offers to others, installed or not; many are nightly.

Under `--device` those run that aren't about the CPU; of those, what `tests/not_on_pretend.toml` lists must fail on
the pretend accelerator, and nothing else.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import Distribution

# At the end: an installed one comes first.
sys.path.extend(
    str(Path(__file__).parent / "plugins" / one / "src")
    for one in ("eventloop-check", "eventloop-ema", "eventloop-testing")
)

pytest_plugins = ["eventloop_testing.commands", "eventloop_testing.plugin"]


@pytest.fixture(scope="session", autouse=True)
def installed_is_read_once() -> Iterator[None]:
    """Reads the metadata of what is installed once, not for each trainer; that of a test's own packages each time."""
    from eventloop.plugin import discover

    read, folders = discover._text, tuple(filter(None, sys.path))
    known: dict[tuple[str, str], str | None] = {}

    def read_once(distribution: Distribution, name: str) -> str | None:
        file = (discover.folder_of(distribution), name)
        if not file[0].startswith(folders) or not file[0].endswith((".dist-info", ".egg-info")):
            return read(distribution, name)
        if file not in known:
            known[file] = read(distribution, name)
        return known[file]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "_text", read_once)
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of a test that is `sampled(N)` as nightly, but one in N; chooses for a device."""
    if (device := config.getoption("--device")) != "cpu":
        config.hook.pytest_deselected(items=[one for one in items if is_about_cpu(one)])
        items[:] = [one for one in items if not is_about_cpu(one)]
    reasons = not_on_pretend() if device == "pretend" else {}
    for item in items:
        if reason := reasons.get(item.nodeid) or reasons.get(item.nodeid.partition("[")[0]):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        mark = item.get_closest_marker("sampled")
        if mark is not None and case_of(item) % mark.args[0]:
            item.add_marker(pytest.mark.nightly)


def case_of(item: pytest.Item) -> int:
    """Returns the sum of the indices of a case among the values of each `parametrize`.

    So that one in N cases has other values of each, whichever cases are collected.
    """
    params = item.callspec.params  # type: ignore[attr-defined]
    return sum(index_of(params, *mark.args[:2]) for mark in item.iter_markers("parametrize"))


def index_of(params: Mapping[str, object], names: str | Sequence[str], cases: Iterable[Any]) -> int:
    """Returns which case of one `parametrize` the parameters are of; pytest has numbers of the product alone.

    Of an iterator, which pytest has used up, it is 0.
    """
    names = [one.strip() for one in names.split(",")] if isinstance(names, str) else names
    for idx, case in enumerate(cases):
        if isinstance(case, type(pytest.param())):
            case = case.values
        elif len(names) == 1:
            case = (case,)
        if all(params[name] is value for name, value in zip(names, case, strict=True)):
            return idx
    return 0


def is_about_cpu(item: pytest.Item) -> bool:
    """Whether a test says so of itself."""
    return item.get_closest_marker("about_cpu") is not None


def not_on_pretend() -> dict[str, str]:
    """Returns why tests can't pass on the pretend accelerator, by their ids, with or without a case."""
    text = Path(__file__).with_name("tests").joinpath("not_on_pretend.toml").read_text()
    return {
        test: one["reason"] for one in tomllib.loads(text)["impossible"] for test in one["tests"]
    }
