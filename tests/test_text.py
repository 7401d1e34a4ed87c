"""What to do is written as the caller would write it: flags for the command, arguments in Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eventloop import Allowed, ResumeError, SettingError, TrainerBuilder
from eventloop.cli import main
from eventloop.text import allowing, as_option, as_set, for_command, switch_off

TASK = """
import torch
from eventloop import Task


def task(lr: float = 0.1) -> Task:
    return Task(
        model=lambda: torch.nn.Linear(2, 2),
        loss=torch.nn.functional.mse_loss,
        train_dataloader=[(torch.ones(2, 2), torch.ones(2, 2))],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        settings={"max_duration": "1ep"},
    )
"""


def test_the_command_and_python_write_settings_differently():
    """Both can be pasted where they are read, whatever the value holds."""
    assert as_set(run_dir="a b", seed=1) == '`run_dir="a b", seed=1`'
    with for_command():
        assert as_set(run_dir="a b", seed=1) == "`--run-dir 'a b' --seed 1`"
        assert switch_off("ema") == "`-p no:ema`"
        assert as_option("ema", half_life="1ba") == "`--ema.half-life 1ba`"
        assert allowing("plugin_change", "ema") == "`--allow-plugin-change ema`"
    assert as_set(seed=1) == "`seed=1`"
    assert as_option("early-stopping", mode="max") == '`EarlyStopping(mode="max")`'


def test_a_change_is_allowed_as_the_message_says(make_trainer, make_task, clean):
    """What is pasted goes on with the run."""
    make_trainer(run_dir="run", seed=1).fit()

    with pytest.raises(ResumeError) as caught:
        make_trainer(run_dir="run", seed=2)

    said = re.search(r"go on with the change: `(.*)`", str(caught.value))[1]
    settings = {"run_dir": "run", "seed": 2, "device": "cpu", "autoload": False}
    build = said.replace(".build(task, ...)", "")
    builder = eval(build, {"TrainerBuilder": TrainerBuilder, "Allowed": Allowed})
    builder.build(make_task(), max_duration="1ep", **settings).close()


def test_the_command_names_its_flag_for_the_same_problem(clean, capsys):
    """In the same process as code in Python, and no longer afterwards."""
    Path("task.py").write_text(TASK)
    run = ["fit", "task.py", "--run-dir=run", "--device=cpu", "--no-plugins"]
    assert main(run) == 0

    assert main([*run, "--seed=3"]) == 2

    assert "`--allow-config-change`" in capsys.readouterr().err
    assert as_set(seed=1) == "`seed=1`"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_duration": "10 epochs"}, '`max_duration="10ep"`'),
        ({"seed": "many"}, "`seed=0`"),
        ({"deterministic": "perhaps"}, "`deterministic=False`"),
        ({"clip_norm": "much"}, "`clip_norm=0.5`"),
    ],
)
def test_a_wrong_setting_is_corrected_in_python(make_trainer, setting, said):
    """A flag can't be pasted into a call."""
    with pytest.raises(SettingError) as caught:
        make_trainer(**setting)

    assert said in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_script_of_its_own_is_told_of_arguments(clean):
    """A process that the command didn't start has no flags."""
    Path("train.py").write_text(
        f"{TASK}\nfrom eventloop import Trainer\n\n"
        "for seed in (1, 2):\n"
        "    Trainer(task(), run_dir='run', seed=seed, device='cpu', autoload=False).fit()\n"
    )

    ran = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)

    assert "TrainerBuilder(allowed=Allowed(config_change=True))" in ran.stderr
    assert "--allow" not in ran.stderr


def test_no_package_names_a_flag_that_only_the_command_has():
    """What a plugin raises is read in Python as often as on the command line."""
    packages = (Path(__file__).parents[1] / "plugins").glob("eventloop-*")
    # A command of its own is read on the command line alone; so is what such commands share.
    others = (
        one
        for one in packages
        if "eventloop.commands" not in (one / "pyproject.toml").read_text()
        and one.name != "eventloop-runs"
    )

    sources = [path for folder in others for path in folder.glob("src/**/*.py")]
    found = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if re.search(r"`(-p no:|--(?!nproc)[a-z-]+[. ])", line) and '"""' not in line
    ]

    assert len(sources) > 30
    assert found == []
