"""What to do is written as the caller would write it: flags for the command, arguments in Python."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eventloop import Allowed, ResumeError, SettingError, TrainerBuilder
from eventloop import fixes as fixes_module
from eventloop.cli import main
from eventloop.distributed.process_ends import details
from eventloop.errors import Note, notes_of, raise_all
from eventloop.fixes import allowing, as_option, as_set, for_command, published, switch_off
from eventloop_testing.commands import write_distribution

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
    assert as_option("early-stopping", mode="max") == '`EarlyStopping(mode="max")`'
    with for_command():
        assert as_set(run_dir="a b", seed=1) == "`--run-dir 'a b' --seed 1`"
        assert switch_off("ema") == "`-p no:ema`"
        assert as_option("ema", half_life="1ba") == "`--ema.half-life 1ba`"
        assert allowing("plugin_change", "ema") == "`--allow-plugin-change ema`"


def test_a_change_is_allowed_as_the_message_says(make_trainer, make_task, clean):
    """What is pasted goes on with the run."""
    make_trainer(run_dir="run", seed=1).fit()

    with pytest.raises(ResumeError) as caught:
        make_trainer(run_dir="run", seed=2)

    said = re.search(r"accept the change: `(.*)`", str(caught.value))[1]
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


def test_after_a_command_messages_are_for_python_again(clean):
    """A notebook may call the command, and a trainer in the next cell."""
    Path("task.py").write_text(TASK)

    statuses = [main(["fit", "task.py", *more]) for more in (["--no-plugins"], ["--sed=1"])]

    assert (statuses[0], statuses[1] != 0) == (0, True)
    assert str(SettingError("no", fix=f"write {as_set(seed=1)}")) == "no\n  fix  write `seed=1`"


def test_errors_and_notes_are_read_after_pickling():
    """An error reaches rank 0 by pickle, alone or among several, and in notes."""
    with for_command():
        error = SettingError("no", plugin="ema", fix=f"write {as_set(seed=1)}, say")
        error.add_note(Note(f"or {switch_off('ema')}", "origin"))
    with pytest.raises(SettingError) as caught:
        raise_all([error, SettingError("none")], "the configuration", SettingError)

    several, alone = (pickle.loads(pickle.dumps(one)) for one in (caught.value, error))

    assert str(alone).endswith("plugin  ema\n  fix     write `--seed 1`, say")
    assert "1. no\n  plugin  ema\n  fix     write `--seed 1`, say\n2. none" in str(several)
    assert notes_of(alone, "origin") == ["or `-p no:ema`"]
    assert details(alone).endswith("or `-p no:ema`\n")


def test_a_background_thread_of_the_command_writes_flags():
    """Checkpoints are written by a thread, whose failures the user of the command reads."""
    texts = []

    with for_command():
        thread = threading.Thread(target=lambda: texts.append(as_set(seed=1)))
        thread.start()
        thread.join()

    assert texts == ["`--seed 1`"]


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


@pytest.mark.nightly
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
    # What a package with a command says is read on the command line alone.
    others = [
        folder
        for folder in packages
        if "eventloop.commands" not in (folder / "pyproject.toml").read_text()
    ]

    sources = [path for folder in others for path in folder.glob("src/**/*.py")]
    found = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if re.search(r"`(-p no:|--(?!nproc)[a-z-]+[. ])", line) and '"""' not in line
    ]

    assert len(sources) > 30
    assert found == []


def test_what_is_installed_without_a_plugin_is_not_to_be_installed(site, install):
    """A library, a command and an option have no plugin that could be named."""
    install("cmd-test", group="eventloop.commands")
    install("opt-test", group="eventloop.options")
    install("url-test", group="eventloop.storage")
    install("aa-test")
    write_distribution(site, "eventloop-lib-test", "")

    fixes = {name: fixes_module.install(f"{name}-test") for name in ("lib", "cmd", "opt", "url")}

    assert all(fix.startswith("leave it out; eventloop-") for fix in fixes.values())
    assert "eventloop-lib-test is installed, but is a library to import" in fixes["lib"]
    assert fixes["cmd"].endswith("it adds the command `eventloop cmd-test`")
    assert fixes["opt"].endswith("it adds the option `--opt-test`")
    assert fixes["url"].endswith("it adds checkpoints at URLs")
    assert fixes_module.install("aa-test") == "list what is installed with `eventloop plugins`"


def test_what_is_not_installed_is_still_to_be_installed():
    """With the versions that are needed, if any are."""
    missing = [name for name in published() if not fixes_module.use_without_plugin(name)]

    for name in missing[:3]:
        distribution = published()[name]
        assert f"`pip install {distribution}`" in fixes_module.install(name)
        assert f"`pip install '{distribution}>=2'`" in fixes_module.install(name, ">=2")
    assert fixes_module.install("") == "list what is installed with `eventloop plugins`"


SEVERAL = {"grpo": "eventloop-llm", "lora": "eventloop-llm", "hf_checkpoints": "eventloop-llm"}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_plugin_is_installed_by_the_distribution_that_has_it(name):
    """A distribution may have several plugins, of which none is called like it."""
    fix = fixes_module.install(name, ">=0.1")

    assert fix == (
        f"install it, `pip install '{SEVERAL[name]}>=0.1'`, or from a clone `pip install "
        f"./plugins/{SEVERAL[name]}`"
    )


@pytest.fixture
def published_pair(monkeypatch):
    """The core's repository has the plugins `one-test` and `two-test`, both in eventloop-pair-test."""
    names = dict.fromkeys(("pair-test", "one-test", "two-test"), "eventloop-pair-test")
    monkeypatch.setattr(fixes_module, "published", lambda: names)


@pytest.mark.parametrize(
    ("argv", "pyproject"),
    [
        (["-p", "one-test"], ""),
        (["--two-test.alpha", "1"], ""),
        ([], 'required = ["one-test"]'),
    ],
)
def test_wherever_a_plugin_is_missing_its_distribution_is_named(
    argv, pyproject, published_pair, tiny, run
):
    """`eventloop-one-test` doesn't exist."""
    (tiny / "pyproject.toml").write_text(f"[tool.eventloop]\nautoload = false\n{pyproject}\n")

    ran = run("fit", "tiny.py", *argv)

    assert ran.status in (1, 2)
    assert "pip install eventloop-pair-test" in ran.err
    assert "eventloop-one-test" not in ran.err


def test_the_name_of_a_distribution_of_several_plugins_is_no_plugin(
    published_pair, install, tiny, run
):
    """To install it again would change nothing; its plugins are listed instead."""
    install("one-test", distribution="eventloop-pair-test")

    ran = run("fit", "tiny.py", "-p", "pair-test")

    assert ran.status == 2
    assert (
        "eventloop-pair-test is installed, but has no plugin of this name: it adds one-test"
        in ran.err
    )
    assert "pip install" not in ran.err


@pytest.mark.parametrize(
    ("argv", "pyproject"),
    [
        (["-p", "lib-test"], ""),
        (["-p", "Lib_Test"], ""),
        (["--lib-test.alpha", "1"], ""),
        ([], 'required = ["lib-test>=1"]'),
    ],
)
def test_wherever_a_library_is_named_it_is_not_to_be_installed(argv, pyproject, site, tiny, run):
    """`pip install` says that it is there already, and nothing changes."""
    write_distribution(site, "eventloop-lib-test", "")
    (tiny / "pyproject.toml").write_text(f"[tool.eventloop]\nautoload = false\n{pyproject}\n")

    ran = run("fit", "tiny.py", *argv)

    assert ran.status in (1, 2)
    assert (
        "eventloop-lib-test is installed, but is a library to import and has no plugin" in ran.err
    )
    assert "pip install" not in ran.err
    assert "isn't installed" not in ran.err
