"""Configuration: which layer wins, what it is called, and which keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.clock import Time
from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Choice
from eventloop.errors import SettingError

PYPROJECT = """
[tool.eventloop]
seed = 5
[tool.eventloop.task]
hidden-size = 64
[tool.eventloop.plugins.mixup]
alpha = 0.5
"""
RUN_YAML = "seed: 4\ntask: {lr: 0.4}\nplugins:\n  mixup: {alpha: 0.4}\n"


def read(directory: Path, flags=None, *, environ=None, **options) -> Configuration:
    return Configuration.read(flags, environ=environ or {}, directory=directory, **options)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(SettingError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with `pyproject.toml` and `run.yaml`."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "run.yaml").write_text(RUN_YAML)
    return tmp_path


def test_the_stronger_layer_wins(files):
    """Flag, environment, --config, pyproject.toml, task, default: each is there to be overridden."""
    layers = {
        "flags": {"seed": "2"},
        "environ": {"EVENTLOOP_SEED": "3"},
        "config_file": files / "run.yaml",
    }
    winners = []
    for weakest_left_out in (None, "flags", "environ", "config_file"):
        layers.pop(weakest_left_out, None)
        configuration = read(files, **layers)
        value = configuration.setting_values({"seed": 6})["seed"]
        winners.append((configuration.settings({"seed": 6}).seed, value.source))
    (files / "pyproject.toml").write_text("")
    for task_settings in ({"seed": 6}, {}):
        value = read(files).setting_values(task_settings)["seed"]
        winners.append((value.value, value.source))

    assert [seed for seed, _ in winners] == [2, 3, 4, 5, 6, 0]
    assert [Path(source).name for _, source in winners] == [
        "Trainer(...)",
        "EVENTLOOP_SEED",
        "run.yaml",
        "pyproject.toml",
        "task",
        "default",
    ]


def test_a_section_gathers_the_options_of_all_layers(files):
    """A plugin's options may come from several places at once."""
    environ = {"EVENTLOOP_TASK__LR": "0.3", "EVENTLOOP_LABEL_SMOOTHING__ALPHA": "0.1"}

    configuration = read(files, {"mixup.alpha": "0.2"}, kind="flag", environ=environ)

    assert configuration.section("mixup") == {"alpha": Value("0.2", "flag")}
    assert configuration.section("task") == {
        "hidden_size": Value(64, "pyproject.toml"),
        "lr": Value("0.3", "EVENTLOOP_TASK__LR"),
    }
    assert "alpha" in configuration.section("Label-Smoothing")


def test_dashes_case_and_underscores_are_one(tmp_path):
    """YAML has dashes, TOML underscores, variables capitals."""
    (tmp_path / "run.yaml").write_text("Max-Duration: 3ep\n")

    configuration = read(tmp_path, config_file=tmp_path / "run.yaml")

    assert configuration.settings().max_duration == Time("3ep")


def test_all_wrong_settings_are_told_at_once(tmp_path):
    """Mending one mistake a run is slow."""
    configuration = read(tmp_path, {"seed": "x", "microbatch_size": "0", "max_durtion": "1ep"})

    text = refusal(configuration.settings)

    assert "3 problems" in text
    assert "seed: 'x' isn't of type int" in text
    assert "microbatch_size: 0 is less than one sample" in text
    assert "'max_durtion'; the closest is 'max_duration'" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_durtion", "'max_durtion'; the closest is 'max_duration'"),
        ("mixup.alpha", "no setting is named 'mixup.alpha'"),
    ],
)
def test_what_a_task_sets_that_is_no_setting_is_refused(tmp_path, name, message):
    """Task(settings=...) is a layer like the others, but for options of plugins."""
    text = refusal(read(tmp_path).settings, {name: "1ep"})

    assert message in text


def test_the_autoload_of_a_task_is_weaker_than_any_other(tmp_path):
    """A task of another framework keeps installed algorithms off, unless the user wants them."""
    silent, asked = read(tmp_path), read(tmp_path, flags={"autoload": True})

    found = [one.with_task({"autoload": "callbacks"}).choice for one in (silent, asked)]

    assert [one.autoload for one in found] == ["callbacks", True]
    assert found[0].autoload_reason == "autoload=callbacks, task"


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        ({"flags": {"autoload": False}}, "autoload=false, Trainer(...)"),
        ({"environ": {"EVENTLOOP_AUTOLOAD": "false"}}, "EVENTLOOP_AUTOLOAD"),
        (
            {"environ": {"EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD": "1"}},
            "EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD",
        ),
        ({"choice": Choice(autoload=False, autoload_reason="--no-plugins")}, "--no-plugins"),
    ],
)
def test_every_way_to_switch_autoload_off_agrees_with_the_setting(tmp_path, arrange, reason):
    """One switch with several handles must not be in two positions."""
    configuration = read(tmp_path, **arrange)

    assert configuration.choice.autoload is False
    assert configuration.choice.autoload_reason == reason
    assert configuration.settings().autoload is False


def test_plugins_that_watch_can_be_loaded_alone(tmp_path):
    """A bridge has another framework's training, which an algorithm would change."""
    configuration = read(tmp_path, flags={"autoload": "callbacks"})

    assert configuration.choice.autoload == configuration.settings().autoload == "callbacks"
    assert configuration.choice.autoload_reason == "autoload=callbacks, Trainer(...)"
