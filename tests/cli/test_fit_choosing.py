"""What stops a fit before it begins: rules, owners, the lock; and the lines that let it run."""

from __future__ import annotations

import re

import pytest

HEAD = "import torch\nfrom eventloop import hookimpl\n"
OPTIMIZER = (
    HEAD
    + """
class Plugin:
    def __init__(self, *, lr: float = 0.1): self.lr = lr

    @hookimpl
    def build_optimizers(self, state):
        return {"optimizer": torch.optim.SGD(state.model.parameters(), lr=self.lr)}
"""
)
QUICK = ("--max-duration", "1ba", "--no-plugins", "-p", "aa-test", "-p", "bb-test")


@pytest.fixture
def two(install, tiny):
    """A task, and two plugins that build optimizers."""
    install("aa-test", OPTIMIZER)
    install("bb-test", OPTIMIZER)
    return tiny


def test_two_that_claim_an_action_stop_the_fit_and_the_line_that_is_printed_makes_it_run(run, two):
    """Which of them trains must be somebody's choice."""
    refused = run("fit", "tiny.py", *QUICK)
    table, line = re.search(r"(\[tool.eventloop.owners\])\n(\S+ = \S+)", refused.err).groups()
    (two / "pyproject.toml").write_text(f"{table}\n{line.rstrip(',')}\n")

    ran = run("fit", "tiny.py", *QUICK)

    assert refused.status == 1
    assert "eventloop-aa-test 1.0" in refused.err
    assert "eventloop-bb-test 1.0" in refused.err
    assert ran.status == 0, ran.err


def test_the_task_may_be_preferred(run, install, tiny):
    """`owners` may name it; the plugins, whose optimizers can't be built, aren't asked."""
    for name in ("aa-test", "bb-test"):
        install(name, OPTIMIZER.replace("return {", "return 1 / 0 or {"))
    owner = '[tool.eventloop.owners]\nbuild_optimizers = "{}"\n'
    (tiny / "pyproject.toml").write_text(owner.format("aa-test"))
    refused = run("fit", "tiny.py", *QUICK)
    (tiny / "pyproject.toml").write_text(owner.format("task"))

    assert "ZeroDivisionError" in refused.err
    assert run("fit", "tiny.py", *QUICK).status == 0


def test_a_dormant_plugin_stands_off_with_its_reason(run, install, tiny):
    """And naming it is an error."""
    install("aa-test", "class Plugin:\n    def __init__(self, *, teacher: str): pass\n")

    ran = run("fit", "tiny.py", "--max-duration", "1ba")
    named = run("fit", "tiny.py", "--max-duration", "1ba", "-p", "aa-test")

    assert ran.status == 0, ran.err
    assert "aa-test (waiting for --aa-test.teacher)" in ran.out
    assert named.status == 1
    assert "needs its option 'teacher'" in named.err


def test_a_plugin_from_a_file_takes_part_with_its_options(run, tiny):
    """Nobody packages what is tried for an afternoon."""
    (tiny / "watch.py").write_text(
        "from eventloop import hookimpl\n"
        "class Watch:\n"
        "    def __init__(self, *, x: int = 1): self.x = x\n"
        "    @hookimpl\n"
        "    def fit_end(self, state): print('seen', self.x)\n"
    )
    argv = ("--max-duration", "1ba", "--no-plugins", "-p", "./watch.py:Watch", "--watch.x", "7")

    ran = run("fit", "tiny.py", *argv)

    assert ran.status == 0, ran.err
    assert "seen 7" in ran.out
    assert "watch ./watch.py:Watch (x=7)" in ran.out


@pytest.fixture
def locked(run, install, tiny):
    """A project with a lock on one plugin."""
    install("aa-test", OPTIMIZER)
    assert run("plugins", "lock", *QUICK[2:-2]).status == 0
    return tiny


def test_what_is_locked_runs(run, locked):
    """A lock that refuses its own plugins is none."""
    ran = run("fit", "tiny.py", *QUICK[:-2])

    assert ran.status == 0, ran.err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["-p", "bb-test", "--seed", "1"], '+name = "bb-test"'),
        (["--aa-test.lr", "0.5"], "+lr = 0.5"),
    ],
)
def test_what_differs_from_the_lock_is_refused_and_shown(run, install, locked, argv, line):
    """A result is of the plugins and options that stand in the lock, or it says so."""
    install("bb-test")

    ran = run("fit", "tiny.py", *QUICK[:-2], *argv)
    unlocked = run("fit", "tiny.py", "--unlocked", *QUICK[:-2], *argv)

    assert ran.status == 1
    assert line in ran.err
    assert "--- locked" in ran.err
    assert "`--unlocked`" in ran.err
    assert unlocked.status == 0, unlocked.err


def test_another_version_differs_from_the_lock(run, locked, tmp_path):
    """Versions are half of what a lock is for."""
    info = tmp_path / "site" / "eventloop_aa_test-1.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.0", "Version: 1.1"))

    ran = run("fit", "tiny.py", *QUICK[:-2])

    assert ran.status == 1
    assert '-version = "1.0"' in ran.err
    assert '+version = "1.1"' in ran.err


def test_the_header_says_when_owners_decided_and_over_whom(run, two):
    """What would have trained otherwise is what one compares with."""
    (two / "pyproject.toml").write_text('[tool.eventloop.owners]\nbuild_optimizers = "bb-test"\n')

    ran = run("fit", "tiny.py", *QUICK)
    shown = run("plugins", "order", "build_optimizers", *QUICK[2:])

    assert "build_optimizers: bb-test, by owners, instead of aa-test and the task's" in ran.out
    (loser,) = [line for line in shown.out.splitlines() if "aa-test" in line]
    assert "not asked" in loser
    assert loser.endswith("owners assigns build_optimizers to bb-test")


def test_a_fit_tells_every_problem_of_every_plugin_at_once(run, install, tiny):
    """Mending one a run is slow."""
    install("aa-test", "1 / 0")
    install("bb-test", f"{HEAD}class Plugin:\n    @hookimpl\n    def batch_edn(self): 0\n")
    install("cc-test", "class Plugin: requires = 'nosuch'\n")
    install("dd-test", OPTIMIZER)
    (tiny / "pyproject.toml").write_text(
        '[tool.eventloop]\ndisable = ["nobody"]\norder = {epoch_edn = ["dd-test"]}\n'
        "plugins.dd-test.lr = 'big'\n"
    )

    ran = run("fit", "tiny.py", "-p", "zz-test")

    assert (ran.status, ran.out) == (1, "")
    parts = ("can't be imported", "'batch_edn'", "cc-test implements no hook", "dd-test.lr: 'big'")
    for part in (*parts, "'nobody'", "'epoch_edn'", "'zz-test'"):
        assert part in ran.err


WATCH = """
class Watch:
    def __init__(self, *, y=1): self.y = y

    @hookimpl
    def fit_end(self, state): print("seen")
"""


@pytest.fixture
def brings(tiny):
    """A task file that brings a callback and an algorithm."""
    code = (tiny / "tiny.py").read_text()
    code = code.replace("from eventloop import Task", "from eventloop import Task, hookimpl")
    code = code.replace(
        "    return Task(", "    return Task(callbacks=[Watch()], algorithms=[Clamp()],"
    )
    clamp = WATCH.replace("Watch", "Clamp").replace("seen", "clamped")
    (tiny / "tiny.py").write_text(f"{code}\n{WATCH}\n{clamp}")
    return tiny


def test_what_a_task_brings_can_be_switched_off(run, brings):
    """Algorithms, too: that is what a comparison needs."""
    argv = ("fit", "tiny.py", "--max-duration", "1ba", "--no-plugins")

    with_both = run(*argv)
    without = run(*argv, "-p", "no:watch", "-p", "no:Clamp")

    assert "callbacks: watch Task(callbacks=...)" in with_both.out
    assert "seen" in with_both.out
    assert without.status == 0, without.err
    assert "seen" not in without.out
    assert "clamped" not in without.out
    assert "watch (-p no:watch)" in without.out


def test_a_misspelt_switch_for_what_a_task_brings_is_refused(run, brings):
    """It would leave the plugin as it was."""
    ran = run("fit", "tiny.py", "--max-duration", "1ba", "--no-plugins", "-p", "no:wacth")

    assert ran.status == 2
    assert "no plugin is named 'wacth'; the closest is 'watch'" in ran.err


def test_an_option_of_an_instance_says_that_it_is_one(run, brings):
    """It was built in the task file, where the option stands."""
    ran = run("fit", "tiny.py", "--max-duration", "1ba", "--no-plugins", "--watch.y", "4")

    assert ran.status == 2
    assert "'--watch.y' would have no effect: watch is an instance" in ran.err
    assert "Watch(y=...)" in ran.err


def test_a_file_that_is_named_and_switched_off_is_a_contradiction(run, tiny):
    """As it is for what is installed."""
    (tiny / "watch.py").write_text(f"{HEAD}{WATCH}")

    ran = run("fit", "tiny.py", "-p", "./watch.py:Watch", "-p", "no:watch")

    assert ran.status == 2
    assert "-p ./watch.py:Watch and -p no:watch contradict each other" in ran.err


def test_what_is_required_and_not_allowed_has_two_ways_out(run, install, tiny):
    """The line to paste must be one that helps."""
    install("aa-test", OPTIMIZER)
    (tiny / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["aa-test"]\nallow = []\n')

    ran = run("fit", "tiny.py")

    assert "add 'aa-test' to allow, or take aa-test out of required" in ran.err


def test_a_misspelt_rule_is_refused_with_the_closest(run, tiny):
    """A rule that nobody reads switches nothing off."""
    (tiny / "pyproject.toml").write_text('[tool.eventloop]\ndisabled = ["mixup"]\n')

    assert "no option is named 'disabled'; here it is disable" in run("fit", "tiny.py").err


def test_an_option_at_its_default_is_no_difference_from_the_lock(run, locked):
    """Whoever types the default trains what was locked."""
    assert run("fit", "tiny.py", *QUICK[:-2], "--aa-test.lr", "0.1").status == 0


@pytest.mark.parametrize("answer", ["None", "1 / 0"])
@pytest.mark.parametrize("where", ["", "in_init", "in_hook"])
def test_an_exception_without_a_text_is_reported(run, tiny, install, where, answer):
    """A class of exceptions may be broken itself; who raised it, and where, is known all the same."""
    raises = [f"if {name == where}: raise Mute" for name in ("", "in_init", "in_hook")]
    install(
        "mute-test",
        f"from eventloop import hookimpl\nclass Mute(Exception):\n    def __str__(self): return {answer}\n"
        f"{raises[0]}\nclass Plugin:\n    def __init__(self):\n        {raises[1]}\n"
        f"    @hookimpl\n    def batch_start(self, state):\n        {raises[2]}\n",
    )

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "mute-test")

    assert ran.status != 0
    assert "Mute: (its text can't be read: __str__ raises " in ran.err
    assert "mute-test" in ran.err
