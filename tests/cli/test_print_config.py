"""`--print-config`: every value with its source, as a file that can be read back."""

from __future__ import annotations

import yaml

ALPHA = """
from eventloop import hookimpl

class Plugin:
    def __init__(self, *, alpha: float = 0.4, mode_name: str = "a"):
        self.alpha = alpha

    @hookimpl
    def fit_start(self, state):
        print("alpha is", self.alpha)
"""


def test_what_print_config_prints_is_read_back(run, tiny, install):
    """A run can be written down and repeated."""
    install("alpha-test", ALPHA)
    argv = ["fit", "tiny.py", "--no-plugins", "-p", "alpha-test", "--print-config"]

    printed = run(*argv, "--task.lr=1e-05", "--alpha-test.alpha", "0.2", "--clip-norm", "3")
    (tiny / "run.yaml").write_text(printed.out)
    again = run("fit", "tiny.py", "-p", "alpha-test", "--print-config", "--config", "run.yaml")

    assert printed.status == again.status == 0
    assert yaml.safe_load(printed.out) == yaml.safe_load(again.out)
    assert "  lr: 1.0e-05  # flag" in printed.out.splitlines()


def test_what_task_and_plugins_print_is_not_in_the_file(run, tiny, install):
    """`--print-config > run.yaml` is read back, whatever they say when they are imported."""
    install("alpha-test", "print('a plugin: [')" + ALPHA)
    with (tiny / "tiny.py").open("a") as file:
        file.write("\nprint('a task: [')\n")

    printed = run("fit", "tiny.py", "--no-plugins", "-p", "alpha-test", "--print-config")

    assert yaml.safe_load(printed.out)["task"]
    assert "a plugin: [" in printed.err
    assert "a task: [" in printed.err


def test_print_config_names_every_source_and_trains_nothing(run, tiny, install, monkeypatch):
    """Where a value comes from is the first question when it is wrong."""
    install("alpha-test", ALPHA)
    monkeypatch.setenv("EVENTLOOP_SEED", "3")
    (tiny / "run.yaml").write_text("clip-norm: 2\n")
    (tiny / "pyproject.toml").write_text("[tool.eventloop.plugins.alpha_test]\nalpha = 0.9\n")

    ran = run(
        "fit", "tiny.py", "--print-config", "--config=run.yaml", "--log-interval=2ba",
        "--no-plugins", "-p", "alpha-test",
    )  # fmt: skip

    for line in (
        "log_interval: 2ba  # flag",
        "seed: 3  # EVENTLOOP_SEED",
        "clip_norm: 2.0  # run.yaml",
        "max_duration: 2ep  # task",
        "precision: auto  # default",
        "autoload: false  # --no-plugins",
        "  hidden_size: 4  # default",
        "    alpha: 0.9  # pyproject.toml",
        "    mode_name: a  # default",
    ):
        assert line in ran.out.splitlines()
    assert not (tiny / "runs").exists()
    assert "alpha is" not in ran.out
