"""What commands write."""

from __future__ import annotations

import io
import json

from eventloop.cli.printing import write_json, write_lines, write_table


def test_a_long_line_stays_one_where_nobody_watches(capsys):
    """A log is searched by line."""
    write_lines(["algorithms: " + "mixup 0.1.0, " * 50])

    assert capsys.readouterr().out.count("\n") == 1


def test_no_cell_is_cut_where_nobody_watches(capsys):
    """The reason why a plugin is off may be long."""
    write_table(["name", "reason"], [["mixup", "because " * 40]])

    assert "because " * 39 + "because" in capsys.readouterr().out


def test_brackets_are_text(capsys):
    """A table would read `[a]` as markup."""
    write_lines(["[bold]x[/bold] [1, 2]"])
    write_table(["a"], [["[bold]x"]])

    assert capsys.readouterr().out.split() == ["[bold]x[/bold]", "[1,", "2]", "a", "[bold]x"]


def test_json_is_always_parseable(capsys):
    """NaN is not a JSON."""
    write_json({"loss": float("nan"), "all": [float("inf"), 1.0]})

    parsed = json.loads(capsys.readouterr().out, parse_constant=lambda name: 1 / 0)
    assert parsed == {"loss": None, "all": [None, 1.0]}


def test_on_a_narrow_terminal_nothing_is_cut_and_empty_columns_take_no_room(monkeypatch):
    """Half a reason is none."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    reason = "off because somebody said so in pyproject.toml"

    write_table(["name", "marks", "reason"], [["aa-test", "", reason]])

    words = terminal.getvalue().split()
    assert "marks" not in words
    assert "".join(words).endswith(reason.replace(" ", ""))


HOSTILE = "\x1b[2J\x1b]0;owned\x07\rname\u202e"


def test_names_and_errors_cannot_command_the_terminal(run, tiny):
    """A metric, a data set and an exception with control characters; all lines stay lines."""
    code = (tiny / "tiny.py").read_text()
    for name in ("test", "accuracy"):
        code = code.replace(f'"{name}"', repr(f"{name}\n{HOSTILE}"))
    (tiny / "named.py").write_text(code)
    (tiny / "raises.py").write_text(f"raise LookupError({HOSTILE!r} * 100_000)\n")

    good, bad = run("fit", "named.py", "--no-plugins"), run("fit", "raises.py", "--no-plugins")

    assert (good.status, bad.status) == (0, 1)
    for text in (good.out, good.err, bad.out, bad.err):
        assert not set("\x1b\x07\r\u202e") & set(text)
    assert "\\x1b[2J" in good.out
    assert max(map(len, bad.err.splitlines())) < 10_000
