"""What a crash report of a command ends with."""

from __future__ import annotations

import pytest

WATCH = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def batch_end(self, state):
        {body}
"""


def code(body: str) -> str:
    return WATCH.format(body=body)


def test_a_crash_report_ends_with_the_active_plugins(run, tiny, install):
    """Whoever is asked for help needs them first."""
    install("bad", code("1 / 0"), version="1.2.3")
    install("watch", code("pass"), group="eventloop.callbacks", version="0.4")

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "bad", "-p", "watch")

    report, _, table = ran.err.partition("active plugins\n")
    assert "ZeroDivisionError" in report
    assert "raised by plugin bad (eventloop-bad 1.2.3) in batch_end" in report
    assert [line.split() for line in table.splitlines()] == [
        ["task", "task"],
        ["bad", "algorithm", "eventloop-bad", "1.2.3"],
        ["watch", "callback", "eventloop-watch", "0.4"],
    ]


@pytest.mark.parametrize(
    ("command", "hook"), [("eval", "eval_batch_end"), ("predict", "predict_batch_end")]
)
def test_the_other_commands_report_likewise(command, hook, run, tiny, install):
    """Plugins take part in them, too."""
    install("bad", code("1 / 0").replace("batch_end", hook))

    ran = run(command, "tiny.py", "--no-plugins", "-p", "bad")

    assert ran.status == 1
    assert ran.err.index("ZeroDivisionError") < ran.err.index("active plugins\n  task")


def test_wrong_usage_is_no_crash(run, tiny):
    """The message says what to do; plugins have nothing to do with it."""
    ran = run("fit", "tiny.py", "--no-plugins", "--max-duration", "none")

    assert ran.status == 2
    assert "max_duration is not set" in ran.err
    assert "active plugins" not in ran.err


@pytest.mark.parametrize("status", [0, 3])
def test_a_plugin_that_exits_has_failed(run, install, tiny, status):
    """A run that ends in silence with status 0 looks as if it were done."""
    hook = f"    @hookimpl\n    def batch_end(self): sys.exit({status})\n"
    install("aa-test", f"import sys\nfrom eventloop import hookimpl\nclass Plugin:\n{hook}")

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "aa-test")

    assert ran.status == 1
    assert ran.err.startswith(f"SystemExit: {status}; raised by plugin aa-test")
    assert "active plugins" in ran.err


def test_the_table_ends_the_report_also_where_close_alone_failed(run, install, tiny):
    """What is asked first about a crash is who was there."""
    hook = "    @hookimpl\n    def close(self): 1 / 0\n"
    install("aa-test", f"from eventloop import hookimpl\nclass Plugin:\n{hook}")

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--max-duration", "1ba")

    assert ran.status == 1
    assert ran.err.rstrip().splitlines()[-1].split()[:2] == ["aa-test", "algorithm"]


@pytest.mark.nightly
def test_a_warning_of_ours_has_no_line_of_ours(tiny, install, run_python, tmp_path):
    """It is about a plugin, whose line stands in it."""
    hook = "    @hookimpl\n    def batch_end(self): 1 / 0\n"
    install(
        "aa-test",
        f"from eventloop import hookimpl\nclass Plugin:\n{hook}",
        group="eventloop.callbacks",
    )
    argv = ["fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--on-callback-error", "disable"]
    site = str(tmp_path / "site")

    done = run_python(
        f"import sys; sys.path.insert(0, {site!r})\n"
        f"from eventloop.cli import main; sys.exit(main({argv!r}))"
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("UserWarning: aa-test (eventloop-aa-test 1.0) is switched off")
    assert "observe.py" not in done.stderr
    assert "warnings.warn(" not in done.stderr
