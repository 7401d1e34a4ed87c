"""`eventloop fit`."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

ALPHA = """
from eventloop import hookimpl

class Plugin:
    '''Watches.

    Args:
        alpha: how much.
        mode_name: which.
    '''

    def __init__(self, *, alpha: float = 0.4, mode_name: str = "a") -> None:
        self.alpha = alpha

    @hookimpl
    def fit_start(self, state):
        print("alpha is", self.alpha)
"""


def test_a_run_prints_a_header_and_its_result(run, tiny):
    """What trained, on what, and how well: the header and the last line say it."""
    ran = run("fit", "tiny.py", "--no-plugins", "--task.lr", "0.5", "--run-dir", "here")
    lines = ran.out.splitlines()

    assert (ran.status, ran.err) == (0, "")
    assert lines[0].startswith("eventloop ")
    assert lines[1].startswith("device: cpu (")
    assert lines[1].endswith("precision fp32, seed 0")
    assert lines[2:6] == [
        "task: tiny.py (lr=0.5), 2ep",
        "run dir: here",
        "algorithms: none",
        "callbacks: none",
    ]
    assert lines[-1].startswith("2 epochs, 6 batches in ")
    assert "test/accuracy 0." in lines[-1]


STOPS = """
from eventloop import hookimpl

class Stops:
    '''Has seen enough.'''

    @hookimpl(every="2ba")
    def batch_end(self, state):
        state.request_stop("stops: enough is enough")
"""


def test_a_run_that_was_stopped_says_why(run, tiny):
    """Shorter than it was meant to be, it would look as if something had been lost."""
    (tiny / "stops.py").write_text(STOPS)

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "./stops.py:Stops")
    whole = run("fit", "tiny.py", "--no-plugins")

    stopped, done, _ = ran.out.splitlines()[-3:]
    assert stopped.startswith("stopped by stops (")
    assert stopped.endswith("): enough is enough")
    assert done.startswith("0 epochs, 2 batches in ")
    assert "stopped" not in whole.out


@pytest.mark.parametrize("form", ["--max-duration", "--max_duration"])
def test_a_flag_overrides_what_the_task_brings(run, tiny, form):
    """A task file says how long it trains, for everybody who has nothing else to say."""
    assert "1 epoch, 3 batches" in run("fit", "tiny.py", "--no-plugins", form, "1ep").out


def test_the_seed_is_set_before_the_module_and_holds_for_the_task(run, clean):
    """Weights drawn while the file is read or the task is built are part of the run."""
    (clean / "draws.py").write_text(
        "import torch\nprint('module', torch.rand(1).item())\n"
        "def task():\n    print('task', torch.rand(1).item())\n    return None\n"
    )

    first = run("fit", "draws.py", "--no-plugins", "--seed", "1").out
    other = run("fit", "draws.py", "--no-plugins", "--seed", "2").out

    assert first == run("fit", "draws.py", "--no-plugins", "--seed", "1").out != other


def test_help_shows_settings_and_the_options_of_plugins_and_task(run, tiny, install):
    """It works without TASK; with it, the task's options are there too."""
    install("alpha-test", ALPHA)
    install("broken-test", "1 / 0")

    without, named = run("fit", "--help"), run("fit", "tiny.py", "--help")

    assert without.status == named.status == 0
    assert "--max-duration time or none" in without.out
    assert "--alpha-test.mode-name str" in without.out
    assert "plugin 'broken-test' can't be imported" in without.out
    assert "the learning rate, 100% of it. (default: 0.1)" in named.out
    assert "--task.hidden-size int" in named.out
    assert "--task." not in without.out


def test_a_plugin_may_be_named_like_a_setting(run, tiny, install):
    """`--seed` is the setting, `--seed.alpha` the plugin's."""
    install("seed", ALPHA)

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "seed", "--seed", "3", "--seed.alpha", "0.1")

    assert ran.status == 0
    assert "seed 3" in ran.out
    assert "algorithms: seed 1.0 (alpha=0.1)" in ran.out


def test_a_folder_is_exported_by_a_plugin_alone(run, tiny):
    """With a slash it can't be a file whose suffix was forgotten; without a plugin it is refused."""
    Path("folder.py").write_text(
        "from eventloop import hookimpl\n"
        "class Folder:\n"
        "    role = 'algorithm'\n"
        "    @hookimpl(conditional=True)\n"
        "    def export(self, state, path):\n"
        "        if path.suffix:\n"
        "            return None\n"
        "        path.mkdir()\n"
        "        return path\n"
    )
    with_plugin = ("fit", "tiny.py", "--no-plugins", "-p", "folder.py:Folder")

    refused = run(*with_plugin, "--export", "out")
    assert refused.status == 2
    assert "or `--export out/` with a plugin that writes a folder, such as export" in refused.err
    assert run("fit", "tiny.py", "--no-plugins", "--export", "out/").status == 2
    ran = run(*with_plugin, "--export", "out/")

    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1] == "exported: out, the weights of the last step"
    assert Path("out").is_dir()


def test_export_writes_the_trained_weights(run, tiny):
    """Those of the last step."""
    ran = run("fit", "tiny.py", "--no-plugins", "--export", "model.safetensors")

    assert ran.status == 0
    assert sorted(load_file("model.safetensors")) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tniy.py"], "TaskFileError: there is no file 'tniy.py'; the closest is 'tiny.py'"),
        (["tiny.py", "--max-durtion", "1ep"], "the closest is '--max-duration'"),
        (["tiny.py", "--lr", "1"], "did you mean --task.lr?"),
        (["tiny.py", "--alpha", "1"], "did you mean --alpha-test.alpha"),
        (["tiny.py", "--alpha-test.alhpa", "1"], "the closest is '--alpha-test.alpha'"),
        (["tiny.py", "--max-duration", "5 epoch"], "write '5ep'"),
        (["tiny.py", "--alpha-test.alpha", "x"], "isn't of type float"),
        (["tiny.py", "-p", "no:alpha-tset"], "the closest is 'alpha-test'"),
        (["tiny.py", "-p", "no:alpha-test", "--alpha-test.alpha=1"], "would have no effect"),
        (["tiny.py", "--config", "run.yaml"], "there is no file 'run.yaml'"),
        (["tiny.py", "--max-duration", "none"], "set `--max-duration 10ep`"),
        (["tiny.py", "--run-dir", "tiny.py"], "is not a folder"),
    ],
)
def test_wrong_usage_is_told_before_training(run, tiny, install, argv, message):
    """One message in the form of an error, no traceback, status 2."""
    install("alpha-test", ALPHA)

    ran = run("fit", *argv)

    assert ran.status == 2
    assert message in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nosuch", "plugin 'alpha-test' can't be imported: ModuleNotFoundError"),
        ("class Plugin:\n    def __init__(self, *, x: int): pass", "needs its option 'x'"),
        ("class Plugin:\n    def __init__(self): 1 / 0", "can't be built: ZeroDivisionError"),
    ],
)
def test_a_plugin_that_can_not_take_part_stops_the_run(run, tiny, install, code, message):
    """It isn't the user's usage that is wrong, so the status is 1; the flag that helps is named."""
    install("alpha-test", code)

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "alpha-test")

    assert ran.status == 1
    assert message in ran.err
    assert "`-p no:alpha-test`" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self, *, x: int): pass",
        "def __init__(self): 1 / 0",
        'requires = ("nosuch",)',
        'name = "task"',
    ],
)
def test_the_way_out_of_a_plugin_of_a_file_is_its_flag(run, tiny, body):
    """`-p no:NAME` beside `-p FILE:CLASS` would contradict it."""
    Path("own.py").write_text(
        "from eventloop import hookimpl\n"
        f"class Own:\n    {body}\n    @hookimpl\n    def fit_start(self): pass\n"
    )

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "own.py:Own")

    assert ran.status in (1, 2)
    assert "leave `-p own.py:Own` out" in ran.err
    assert "no:" not in ran.err


def test_two_plugins_of_one_name_stop_the_run(run, tiny, install):
    """Both are named, with versions."""
    install("twin-test", distribution="one", version="1.0")
    install("twin-test", distribution="two", version="2.0")

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "twin-test")

    assert ran.status == 1
    assert "one 1.0 and two 2.0" in ran.err


def test_a_failure_of_the_training_is_shown_in_full(run, tiny, install):
    """What isn't ours to explain keeps its traceback, and the note that says whose it is."""
    install("alpha-test", ALPHA.replace('print("alpha is", self.alpha)', "1 / 0"))

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "alpha-test")

    assert ran.status == 1
    assert "Traceback" in ran.err
    assert "ZeroDivisionError" in ran.err
    assert "-p no:alpha-test" in ran.err


def test_without_a_package_for_it_progress_is_plain_lines(tiny, run, monkeypatch):
    """Training in silence looks as if it hung."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")

    lines = run("fit", "tiny.py").out.splitlines()

    assert [one.split("  ")[0] for one in lines if "samples/s" in one] == ["epoch 1/2", "epoch 2/2"]
    is_there = any(one.startswith("off: ") and "progress" in one for one in lines)
    assert sum("pip install eventloop-progress" in one for one in lines) == (not is_there)


def test_a_plugin_that_shows_progress_takes_the_place_of_the_lines(tiny, run, monkeypatch):
    """It is known by what it declares, so that any package may do it."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tiny / "quiet.py").write_text(
        "from eventloop import hookimpl\n"
        "class Quiet:\n"
        "    shows_progress = True\n"
        "    @hookimpl\n"
        "    def fit_end(self): print('quiet, done')\n"
    )

    out = run("fit", "tiny.py", "-p", "quiet.py:Quiet").out

    assert "quiet, done" in out
    assert "samples/s" not in out
    assert "eventloop-progress" not in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["tiny.py"], "fix  write `eventloop fit tiny.py`"),
        (["fit", "tiny.py:mine"], "write `eventloop fit tiny.py`, and `task = mine`"),
        (["fit", "tiny.py", "-p", "label_smoothing"], "`pip install eventloop-label-smoothing`"),
    ],
)
def test_what_a_first_command_line_lacks_is_told(argv, told, run, tiny):
    """A new user knows neither commands nor packages."""
    ran = run(*argv)

    assert ran.status == 2
    assert told in ran.err
