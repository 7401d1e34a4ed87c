"""Runs the nightly tests, or a tenth of them; repeats one that failed, by itself.

    python tools/nightly.py [--tenth N] [PYTEST ARGUMENT ...]

`--tenth` takes a number from 0 to 9, or "commit": the commit's hash chooses one, in a shallow clone, too, so that the
commits of a day run most of the tests. A test is in one tenth by its id, wherever it runs. A test that failed runs once more in a
process of its own when all others are done, and counts as failed if it fails again; of more than ten failures none is
repeated. The id of a failed test is printed when it fails. The exit status is that of pytest.

With `--device pretend -m "not nightly"` these are the tests that every change runs, on the pretend accelerator.

The script is a plugin of pytest, too, which the processes of pytest-xdist load.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from typing import Any

import pytest

MOST_REPEATED = 10
REPEATED = "passed when repeated"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--tenth`."""
    parser.addoption("--tenth", help="0 to 9, or 'commit'; default: all nightly tests")


@pytest.hookimpl(trylast=True)  # the reporter registers itself there
def pytest_configure(config: pytest.Config) -> None:
    """Prints the id of a test when it fails: a run of an hour that is cut off has said which."""
    if reporter := config.pluginmanager.getplugin("terminalreporter"):
        config.pluginmanager.register(_Failures(reporter))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of other tenths."""
    if (given := config.getoption("tenth")) is None:
        return
    tenth = _tenth_of_commit() if given == "commit" else int(given)
    out = [item for item in items if tenth_of(item.nodeid) != tenth]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if tenth_of(item.nodeid) == tenth]


@pytest.hookimpl(trylast=True)  # when the processes of pytest-xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Repeats what failed, before pytest counts it."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    ids = dict.fromkeys(report.nodeid for report in failed)
    are_tests = all(isinstance(report, pytest.TestReport) for report in failed)
    if not are_tests or not 0 < len(ids) <= MOST_REPEATED:
        return
    reporter.write_line("")
    passed = {one for one in ids if _passes(one, session.config, reporter)}
    for kind in ("failed", "error"):
        reporter.stats[kind] = [
            one for one in reporter.stats.get(kind, ()) if one.nodeid not in passed
        ]
    first = {report.nodeid: report for report in reversed(failed) if report.nodeid in passed}
    reporter.stats[REPEATED] = [first[one] for one in ids if one in passed]
    if len(passed) == len(ids) and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the failures of tests that passed when they were repeated."""
    for report in terminalreporter.stats.get(REPEATED, ()):
        terminalreporter.section(f"{report.nodeid} {REPEATED}; it had failed")
        terminalreporter.write_line(report.longreprtext)


def tenth_of(nodeid: str) -> int:
    """Returns the tenth of a test, 0 to 9; the same in every process and on every machine."""
    return zlib.crc32(nodeid.encode()) % 10


class _Failures:
    """Prints the ids of failed tests as they come."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)  # below the letter of the test
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints one."""
        if report.failed:
            self._reporter.write_line("")
            self._reporter.write_line(f"failed in its {report.when}: {report.nodeid}")


def _tenth_of_commit() -> int:
    command = ["git", "rev-parse", "HEAD"]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(read.stdout, 16) % 10


def _passes(nodeid: str, config: pytest.Config, reporter: Any) -> bool:
    """Runs a test by itself; prints what came of it."""
    command = [sys.executable, "-m", "pytest", "-m", config.getoption("markexpr"), nodeid]
    if device := config.getoption("--device", None):
        command += ["--device", device]
    root = config.rootpath
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode:
        reporter.write(ended.stdout + ended.stderr)
    reporter.write_line(f"repeated {nodeid}: {'failed again' if ended.returncode else 'passed'}")
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "nightly", "-m", "nightly", *sys.argv[1:]]))
