"""A package with thousands of broken entry points: each is a problem, and none is the end."""

from __future__ import annotations

import sys

import pytest

from eventloop.cli import main
from eventloop.config.configuration import Configuration
from eventloop.plugin.assemble import assemble

# By name: what the entry point says that a file calls p0, p1, ...
BROKEN = {
    "no module": "no_such_module_{}:Plugin",
    "no attribute": "os:nothing_{}",
    "no value": "",
    "no syntax": "::{}",
    "words": "a b c:{}",
    "a number": "1x{}:Plugin",
    "an extra that is missing": "os:path [none{}]",
    "a function": "os:getcwd",
    "a class without hooks": "collections:OrderedDict",
    "it exits": "exits_at_import:Plugin",
}


def broken(value: str, number: int, site) -> None:
    """Puts a distribution on a path whose entry points are all broken alike."""
    info = site / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    lines = "".join(f"p{idx} = {value.format(idx)}\n" for idx in range(number))
    (info / "entry_points.txt").write_text(f"[eventloop.callbacks]\n{lines}")
    (site / "exits_at_import.py").write_text("import sys\nsys.exit(3)\n")


@pytest.mark.parametrize(
    "number", [20, pytest.param(5000, marks=pytest.mark.nightly)], ids="x{}".format
)
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.usefixtures("clean")
def test_a_lock_is_refused_with_every_problem(kind, number, tmp_path, capsys, monkeypatch):
    """Whoever repairs a package sees all that is broken, and a lock is never half written."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    broken(BROKEN[kind], number, tmp_path / "site")

    status = main(["plugins", "lock"])

    err = capsys.readouterr().err
    assert status == 1
    assert "Traceback" not in err
    assert not list(tmp_path.glob("work/eventloop.lock"))
    named = {word for word in err.replace("`", " ").replace("'", " ").split() if word[:1] == "p"}
    assert {f"p{idx}" for idx in range(number)} <= named


@pytest.mark.nightly
@pytest.mark.usefixtures("clean")
def test_the_work_grows_with_the_number_of_problems(tmp_path, monkeypatch):
    """Thousands of problems once took the square of that: every plugin was held against each."""
    calls = {}
    for number in (100, 400):
        site = tmp_path / f"site{number}"
        broken(BROKEN["no module"], number, site)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(site))
            calls[number] = calls_of_a_dry_assembly()

    assert calls[400] < 5 * calls[100]


def calls_of_a_dry_assembly() -> int:
    """Counts the calls that looking at all plugins takes."""
    calls = 0

    def count(frame, event, arg) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assemble(Configuration())
    finally:
        sys.setprofile(None)
    return calls
