"""Rows of one's own, `--variants FILE.yaml`: each algorithm at the options that suit it."""

from pathlib import Path

import pytest

from eventloop import SettingError
from eventloop.commands import UsageError, prepare
from eventloop_experiments.ablate.ablation_request import COMMAND, read_ablation, read_command_line
from eventloop_experiments.ablate.ablation_runs import runs_of
from eventloop_experiments.ablate.variants import read_variants

ALPHA = """
from eventloop import hookimpl

class Plugin:
    def __init__(self, *, alpha: float = 0.4) -> None: pass

    @hookimpl
    def close(self): pass
"""
ROWS = """
none: {task.lr: 0.3}
some: {-p: aa-test, task.lr: 1e-2}
much: {-p: aa-test, aa-test.alpha: 0.9}
both of them: {-p: [aa-test, bb_test]}
"""


@pytest.fixture
def read(tiny, install):
    """Reads a command line with a file of rows, where two algorithms and a callback are installed."""
    install(tiny, "aa-test", ALPHA)
    install(tiny, "bb-test", ALPHA)
    install(tiny, "watch-test", ALPHA, "eventloop.callbacks")

    def read(rows, *argv):
        Path("rows.yaml").write_text(rows)
        words = ["tiny.py", "--no-plugins", "--variants", "rows.yaml", *argv]
        arguments, variants = read_command_line(words)
        return read_ablation(arguments, prepare(arguments, COMMAND), variants)

    return read


def test_each_row_has_its_algorithms_and_options(read):
    """What stands on the command line is for all of them, and a row is stronger."""
    ablation = read(ROWS, "--task.lr", "0.1", "--aa-test.alpha", "0.2", "--seeds", "2")
    argv = {one.variant.name: one.argv for one in runs_of(ablation)}

    common = ("fit", "tiny.py", "--unlocked", "--no-plugins")
    aa = ("-paa-test", "-pno:bb-test", "--task.lr=0.1", "--aa-test.alpha=0.2")
    assert argv == {
        "none": (*common, "-pno:aa-test", "-pno:bb-test", "--task.lr=0.1", "--task.lr=0.3", "--seed=1"),
        "some": (*common, *aa, "--task.lr=1e-2", "--seed=1"),
        "much": (*common, *aa, "--aa-test.alpha=0.9", "--seed=1"),
        "both of them": (
            *common, "-paa-test", "-pbb_test", "--task.lr=0.1", "--aa-test.alpha=0.2", "--seed=1",
        ),
    }  # fmt: skip
    assert len(runs_of(ablation)) == 2 * 4


def test_there_is_always_a_row_to_compare_with(read):
    """First in the table, with the options of the command line."""
    ablation = read("aa: {-p: aa-test}", "-p", "watch-test", "--seeds", "1")

    assert [one.variant.name for one in runs_of(ablation)] == ["none", "aa"]
    assert "-pwatch-test" in runs_of(ablation)[0].argv


def test_another_file_is_another_ablation(read):
    """Results of other rows, or of other options, are not taken for these."""
    first, same = read(ROWS), read(ROWS)
    other = read(ROWS.replace("0.9", "0.8"))

    assert first.folder == same.folder
    assert first.folder != other.folder


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("[aa-test]", "is not a mapping"),
        ("none: {task.lr: 0.3}", "has no row to compare"),
        ("none: {-p: aa-test}\naa: {-p: aa-test}", "the row 'none' has algorithms, aa-test"),
        ("aa: aa-test", "aa: 'aa-test' is not a mapping"),
        ("aa: {-p: aa-test, task.lr: [0.1]}", "task.lr is not a text or a number"),
        ("../aa: {-p: aa-test}", "'../aa' can't be the name of a row"),
        ("a b: {-p: aa-test}\nA-B: {-p: aa-test}", "two rows would have one folder"),
        ("aa: {-p: aa-test", "can't be read: "),
        (
            "aa: {-p: aa-test, bb-test.alpha: 1}\nbb: {-p: bb-test}",
            "has --bb-test.alpha, but not 'bb-test'",
        ),
        ("aa: {-p: aa-test, task.rl: 1}", "no option of this run is named 'task.rl'"),
        ("aa: {-p: bb-test}", "the algorithm 'aa-test' is in no row"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_a_run(rows, said, read):
    """With what is wrong, and what to do."""
    with pytest.raises(UsageError) as caught:
        read(rows, "-p", "aa-test")

    assert said in str(caught.value)
    assert "\n  fix  " in str(caught.value)


def test_a_value_of_another_type_is_refused_before_a_run(read):
    """An hour later it would be a failed run."""
    with pytest.raises(SettingError, match="lr"):
        read("aa: {-p: aa-test, task.lr: fast}")


def test_a_file_that_is_not_there_is_named(tiny):
    """As any other that can't be read."""
    with pytest.raises(UsageError, match=r"--variants none.yaml can't be read: No such file"):
        read_variants(Path("none.yaml"))


def test_windows_line_endings_are_none_of_its_business(tiny):
    """A file that went through an editor elsewhere says the same."""
    Path("rows.yaml").write_bytes(ROWS.encode())
    Path("other.yaml").write_bytes(ROWS.replace("\n", "\r\n").encode())

    assert read_variants(Path("rows.yaml")) == read_variants(Path("other.yaml"))
