"""`tools/nightly.py`: which nightly tests run, and what becomes of one that failed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "nightly.py"
# `fails(2)` fails in its first two runs.
FAKE = """
from pathlib import Path
import pytest

def fails(times):
    runs = Path("runs.txt")
    runs.write_text(f"{runs.read_text() if runs.exists() else ''}x")
    assert len(runs.read_text()) > times

pytestmark = pytest.mark.nightly
"""


@pytest.fixture
def nightly(tmp_path):
    """Runs the script on a test file; returns its exit status and what it printed."""
    settings = '[pytest]\nmarkers = nightly: slow\naddopts = -m "not nightly"\n'
    (tmp_path / "pytest.ini").write_text(settings)

    def nightly(tests, *arguments):
        (tmp_path / "test_fake.py").write_text(FAKE + tests)
        return run(tmp_path, *arguments)

    return nightly


def run(folder, *arguments):
    environ = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, SCRIPT, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


MANY = '@pytest.mark.parametrize("n", range(40))\ndef test_one(n): pass\n'
PARALLEL = ("-p", "xdist", "-n", "2")
alone_or_parallel = pytest.mark.parametrize(
    "flags",
    [(), pytest.param(PARALLEL, marks=pytest.mark.nightly)],
    ids=["one process", "two"],
)


def tenth(number):
    """Returns the tests of MANY that are in a tenth."""
    tenth_of = runpy.run_path(str(SCRIPT))["tenth_of"]
    ids = [f"test_fake.py::test_one[{n}]" for n in range(40)]
    return {one for one in ids if tenth_of(one) == number}


def chosen(text):
    return set(re.findall(r"test_fake\.py::test_one\[\d+\]", text))


def test_each_test_is_in_one_tenth():
    """Ten runs are the whole tier, and none takes much longer than another."""
    assert sum(len(tenth(number)) for number in range(10)) == 40
    assert max(len(tenth(number)) for number in range(10)) < 10


@alone_or_parallel
def test_a_tenth_runs_alone(flags, nightly):
    """The processes of pytest-xdist have to choose alike."""
    status, text = nightly(MANY, "-v", "--tenth=3", *flags)

    assert (status, chosen(text)) == (0, tenth(3))


def test_the_commits_hash_chooses_the_tenth(nightly, tmp_path):
    """A shallow clone has it, too, and nothing has to remember which tests have run."""
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--allow-empty"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run([*commit, "-q", "-m", "a"], cwd=tmp_path, check=True)
    head = ["git", "rev-parse", "HEAD"]
    read = subprocess.run(head, cwd=tmp_path, capture_output=True, text=True, check=True)

    _, text = nightly(MANY, "-v", "--tenth=commit")

    assert chosen(text) == tenth(int(read.stdout, 16) % 10)


@pytest.mark.nightly
def test_a_test_that_fails_once_is_no_failure(nightly):
    """A machine that is busy is no mistake; the failure is shown all the same."""
    status, text = nightly("def test_one(): fails(1)\ndef test_two(): pass\n")

    assert status == 0
    assert "AssertionError" in text
    assert re.search(r"1 passed, 1 passed when repeated in [\d.]+s", text.splitlines()[-1])


@alone_or_parallel
def test_a_test_that_fails_twice_is_one(flags, nightly):
    """Nothing is repeated more than once."""
    status, text = nightly("def test_one(): fails(2)\ndef test_two(): pass\n", *flags)

    assert status == 1
    assert re.search(r"1 failed, 1 passed in [\d.]+s", text.splitlines()[-1])


@alone_or_parallel
def test_a_failure_is_printed_when_it_happens(flags, nightly):
    """A run of an hour that is cut off has said what failed."""
    later = '@pytest.mark.parametrize("n", range(20))\ndef test_two(n): pass\n'

    _, text = nightly("def test_one(): fails(1)\n" + later, *flags)

    printed = text.index("failed in its call: test_fake.py::test_one")
    assert printed < text.index("[100%]") < text.index("AssertionError")


def test_tests_of_every_change_may_be_repeated_likewise(nightly):
    """Those of them that run on the pretend accelerator, say."""
    status, text = nightly("pytestmark = []\ndef test_one(): fails(1)\n", "-m", "not nightly")

    assert (status, "1 passed when repeated" in text.splitlines()[-1]) == (0, True)


def test_a_fixture_that_fails_once_is_no_failure(nightly):
    """A test fails in its fixtures, too."""
    fixture = "@pytest.fixture\ndef made(): fails(1)\ndef test_one(made): pass\n"

    status, text = nightly(fixture)

    assert (status, "1 passed when repeated" in text.splitlines()[-1]) == (0, True)


def test_many_failures_are_not_repeated(nightly):
    """They have one cause, and to repeat them would take hours."""
    tests = '@pytest.mark.parametrize("n", range(11))\ndef test_one(n): assert 0\n'

    status, text = nightly(tests)

    assert (status, text.count("failed again")) == (1, 0)


def test_what_cannot_be_imported_is_a_failure(nightly):
    """Nothing in it has run."""
    status, text = nightly("import no_such_module\n")

    assert status == pytest.ExitCode.INTERRUPTED
    assert "repeated" not in text


@pytest.mark.parametrize("number", [0, pytest.param(1, id="one"), 2])
@pytest.mark.parametrize(("word", "kind"), [("a", int), ("a", str)])
@pytest.mark.parametrize("folder", ["here"], indirect=True)
def test_a_case_is_counted_by_the_values_of_each_of_its_parameters(
    request, number, word, kind, folder
):
    """One in N cases of a test that is `sampled(N)` has others of each; pytest numbers the product alone."""
    (case_of,) = (
        one.case_of for one in request.config.pluginmanager.get_plugins() if hasattr(one, "case_of")
    )

    assert case_of(request.node) == number + [int, str].index(kind)


@pytest.fixture
def folder(request):
    return request.param
