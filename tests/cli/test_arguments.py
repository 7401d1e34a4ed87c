"""The first look at a command line."""

from __future__ import annotations

import pytest

from eventloop.cli.arguments import Command, CommandOption, read_arguments
from eventloop.errors import UsageError

COMMAND = Command(
    "fit",
    "Trains.",
    (CommandOption("export", "FILE", "writes"), CommandOption("export-best", "", "the best")),
)


@pytest.mark.parametrize(
    "argv",
    [
        ["t.py", "--max-duration", "1ep", "--task.hidden-size", "4", "--export", "x"],
        ["--max_duration", "1ep", "t.py", "--task.hidden_size=4", "--export=x"],
        ["--Max-Duration=1ep", "--export", "x", "--task.hidden-size=4", "t.py"],
    ],
)
def test_options_are_read_however_they_are_written(argv):
    """Dashes and underscores, with and without an equals sign, before and after TASK."""
    arguments = read_arguments(argv, COMMAND)

    assert arguments.task == "t.py"
    assert arguments.flags == {"max_duration": "1ep", "task.hidden_size": "4"}
    assert arguments.given == {"export": "x"}


def test_values_may_look_like_options():
    """Numbers are negative, and values contain equals signs."""
    arguments = read_arguments(["--a", "-1e-3", "--b=--x=y", "--c", "-.5"], COMMAND)

    assert arguments.flags == {"a": "-1e-3", "b": "--x=y", "c": "-.5"}


def test_plugins_are_chosen_with_p():
    """As in pytest."""
    choice = read_arguments(["-p", "mixup", "-pno:ema", "-p=watch"], COMMAND).choice

    assert choice.insist == ("mixup", "watch")
    assert choice.off == ("ema",)


def test_no_plugins_takes_no_value():
    """What follows it is TASK."""
    arguments = read_arguments(["--no-plugins", "t.py"], COMMAND)

    assert arguments.task == "t.py"
    assert (arguments.choice.autoload, arguments.choice.autoload_reason) == (False, "--no-plugins")


def test_names_may_be_given_one_by_one():
    """As plugins may with -p."""
    command = Command("ablate", "", (CommandOption("keep", "NAMES", ""),))

    assert (
        read_arguments(["--keep", "ema", "--keep=swa,sam"], command).given["keep"] == "ema,swa,sam"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed"], "--seed needs a value, but nothing follows"),
        (["--seed", "--device", "cpu"], "--seed needs a value, but '--device' follows"),
        (["-p"], "-p needs a value"),
        (["--profile"], "or `-p profile` for the plugin; where .* `pip install eventloop-profile`"),
        (["--no-plugins=yes"], "--no-plugins takes no value"),
        (["--no-plugins", "--autoload", "true"], "contradict each other"),
        (["a.py", "b.py"], "'b.py' isn't expected here"),
        (["a.py", "--no-plugins", "b"], "--no-plugins takes no value, but 'b' follows"),
        (["a.py", "--export-best", "m.pt"], "write `--export m.pt --export-best`"),
        (["-x"], "there is no option '-x'"),
        (["--config", "a", "--config=b"], "--config is given twice, as 'a' and as 'b'"),
    ],
)
def test_a_line_that_can_not_be_read_is_refused(argv, message):
    """Guessing what was meant would train something else."""
    with pytest.raises(UsageError, match=message):
        read_arguments(argv, COMMAND)
