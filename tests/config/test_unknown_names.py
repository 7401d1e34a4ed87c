"""Names that nothing knows are refused with the closest, wherever they are written."""

from __future__ import annotations

import pytest

from eventloop.cli.arguments import Command, configuration_of, read_arguments
from eventloop.config.configuration import Configuration
from eventloop.config.unknown_names import unknown_keys
from eventloop.errors import SettingError, raise_all

FILE = "task.hidden-size = 64\nplugins.mixup.alpha = 0.5"


@pytest.fixture
def read(tmp_path):
    """Reads a configuration with the `pyproject.toml` of an empty folder, or of this text."""

    def read(flags=None, *, environ=None, pyproject="", kind="keyword"):
        (tmp_path / "pyproject.toml").write_text(f"[tool.eventloop]\n{pyproject}\n")
        return Configuration.read(flags, kind=kind, environ=environ or {}, directory=tmp_path)

    return read


def check(configuration, plugins, task_options=None) -> None:
    raise_all([problem for _, problem in unknown_keys(configuration.layers, plugins, task_options)])


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"task.lrr": "1"}, {}, "'--task.lrr'; the closest is '--task.lr'"),
        ({"lr": "1"}, {}, "'--lr'; did you mean --task.lr?"),
        ({"alpha": "1"}, {}, "did you mean --mixup.alpha?"),
        ({"batch_size": "8"}, {}, "'--batch-size'; here it is Task(train_dataloader=DataLoader("),
        ({"mixup.alhpa": "1"}, {}, "the closest is '--mixup.alpha'"),
        ({"mixpu.alpha": "1"}, {}, "which isn't installed; the closest is 'mixup'"),
        ({"cutmix.alpha": "1"}, {}, "would have no effect: cutmix is switched off"),
        ({}, {"EVENTLOOP_SED": "1"}, "'EVENTLOOP_SED'; the closest is 'EVENTLOOP_SEED'"),
        ({}, {"EVENTLOOP_MIXUP__ALHPA": "1"}, "the closest is 'EVENTLOOP_MIXUP__ALPHA'"),
        ({}, {"EVENTLOOP_MIXPU__ALPHA": "1"}, "which isn't installed; the closest is 'mixup'"),
    ],
)
def test_a_key_that_nobody_knows_is_refused_with_the_closest(read, flags, environ, message):
    """An option that isn't read would leave a run other than it says."""
    configuration = read(flags, kind="flag", environ=environ)

    with pytest.raises(SettingError) as caught:
        check(configuration, {"mixup": ["alpha"], "cutmix": None}, ["lr"])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("max_durtion = '1ep'", "'max_durtion'; the closest is 'max_duration'"),
        ("task.lrr = 1", "'task.lrr'; the closest is 'task.lr'"),
        ("enable = ['ema']", "'enable'; here it is required = [\"NAME\"]"),
        ("exclude = ['ema']", "'exclude'; here it is disable = [\"NAME\"]"),
        ("plugins.mixup.alhpa = 1", "the closest is 'plugins.mixup.alpha'"),
        ("plugins.mixpu.alpha = 1", "which isn't installed; the closest is 'mixup'"),
        ("plugins.label_smoothing.smoothing = 0.1", "`pip install eventloop-label-smoothing`"),
    ],
)
def test_an_unknown_entry_in_a_file_is_refused_with_the_file(read, entry, message):
    """It is found where it stands only if the message says where."""
    with pytest.raises(SettingError) as caught:
        check(read(pyproject=entry), {"mixup": ["alpha"]}, ["lr"])

    assert message in str(caught.value)
    assert "pyproject.toml" in str(caught.value)


def test_files_may_set_options_of_a_plugin_that_is_off(read):
    """A project's configuration stays while one run does without a plugin."""
    environ = {"EVENTLOOP_MIXUP__ALPHA": "1"}

    check(read(environ=environ, pyproject=FILE), {"mixup": None}, ["hidden_size"])


def test_task_options_are_not_judged_where_the_task_was_made_in_python(read):
    """A script shares pyproject.toml with commands whose tasks have options."""
    check(read(pyproject=FILE), {"mixup": ["alpha"]})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--Foo_Bar", "no option is named '--Foo_Bar'"),
        ("--max_epochs", "no option is named '--max_epochs'; here it is --max-duration 10ep"),
        ("--Task.Lrr", "no option is named '--Task.Lrr'; the closest is '--task.lr'"),
        ("--Mixpu.alpha", "'--Mixpu.alpha' is for a plugin 'mixpu', which isn't installed"),
        ("--Cutmix.Alpha", "'--Cutmix.Alpha' would have no effect"),
    ],
)
def test_a_flag_is_printed_as_it_was_typed(typed, message):
    """People search their command line for what the message prints."""
    arguments = read_arguments(["task.py", typed, "1"], Command("fit", "Trains."))
    configuration = configuration_of(arguments)

    with pytest.raises(SettingError) as caught:
        check(configuration, {"mixup": ["alpha"], "cutmix": None}, ["lr"])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        ("keyword", "Max_Epochs", "no setting is named 'Max_Epochs'; here it is max_duration="),
        ("keyword", "maxDuration", "no setting is named 'maxDuration'; the closest is"),
        ("variable", "EVENTLOOP_Sed", "no option is named 'EVENTLOOP_Sed'"),
        ("file", "Max-Durtion", "no option is named 'Max-Durtion'; the closest is 'max_duration'"),
        ("file", "plugins.mixup.Alhpa", "no option is named 'plugins.mixup.Alhpa'"),
        ("file", "task.L-R-R", "no option is named 'task.L-R-R'"),
    ],
)
def test_a_name_is_printed_as_it_was_typed_wherever_it_is(read, kind, key, message):
    """Names are folded to be compared, and for nothing else."""
    configuration = read(
        {key: 1} if kind == "keyword" else None,
        environ={key: "1"} if kind == "variable" else None,
        pyproject=f"{key} = 1" if kind == "file" else "",
    )

    with pytest.raises(SettingError) as caught:
        check(configuration, {"mixup": ["alpha"]}, ["lr"])

    assert message in str(caught.value)


def test_the_advice_for_a_flag_suits_every_command(read):
    """`eventloop sweep` and `ablate` have options that `fit --help` doesn't list."""
    with pytest.raises(SettingError) as caught:
        check(read({"runs": "2"}, kind="flag"), {}, ["lr"])

    assert "`--help` lists all" in str(caught.value)
    assert "eventloop fit" not in str(caught.value)
