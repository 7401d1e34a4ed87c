"""What ranges and choices mean, and which are refused."""

import optuna
import pytest

from eventloop import SettingError
from eventloop.commands import UsageError
from eventloop_experiments.sweep.storage import make_pruner, make_sampler
from eventloop_experiments.sweep.sweep_request import read_command_line, read_sweep


def sweep_of(*argv):
    return read_sweep(*read_command_line(["tiny.py", *argv]))


def drawn(*argv, num_trials=30):
    """Returns the command lines of trials, as sets of words."""
    sweep = sweep_of(*argv)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    values = [sweep.suggested(study.ask()) for _ in range(num_trials)]
    return sweep, values, [sweep.fit_line(one) for one in values]


def test_a_range_has_the_type_of_its_option(tiny):
    """Whole numbers for a width, and the ends belong to it."""
    _, values, lines = drawn("--task.lr", "log:1e-4:1e-1", "--task.width=2:4", "--clip-norm", "1:2")

    assert {one["task.width"] for one in values} == {"2", "3", "4"}
    rates = [float(one["task.lr"]) for one in values]
    assert all(1e-4 <= one <= 1e-1 for one in rates)
    assert sum(one < 3e-3 for one in rates) > 8  # half of the decades, not of the numbers
    assert all("." in one["clip_norm"] for one in values)
    assert lines[0][:3] == ["fit", "tiny.py", "--unlocked"]
    assert f"--task.lr={values[0]['task.lr']}" in lines[0]


def test_a_step_is_kept(tiny):
    """16, 32, 48 and 64, say."""
    _, values, _ = drawn("--task.width", "2:8:3", "--task.lr", "0.1:0.3:0.1")

    assert {one["task.width"] for one in values} == {"2", "5", "8"}
    assert {round(float(one["task.lr"]), 6) for one in values} == {0.1, 0.2, 0.3}


def test_choices_may_be_of_any_type(tiny):
    """Also none, durations and names."""
    argv = ("--clip-norm", "none,1.0", "--max-duration", "1ep,6ba", "--precision", "fp32,bf16")
    _, values, _ = drawn(*argv)

    for name in ("clip_norm", "max_duration", "precision"):
        assert len({one[name] for one in values}) == 2


def test_a_value_that_the_option_takes_is_no_range(tiny):
    """A URL or a path of Windows has a colon in it; a list is one value."""
    sweep, _, lines = drawn("--task.kind", "C:this", "--task.betas", "[1,2]", "--task.width", "2,4")

    assert [one.name for one in sweep.dimensions] == ["task.width"]
    assert all({"--task.kind=C:this", "--task.betas=[1,2]"} <= set(line) for line in lines)
    assert {one["task.kind"] for one in drawn("--task.kind", "a,b:c")[1]} == {"a", "b:c"}


def test_plugins_are_on_and_off_with_their_options(tiny):
    """An option of a plugin that is off would be an error of the trial, and a value of nothing."""
    argv = ("-p", "no:mixup,mixup", "--mixup.alpha", "0.1:1.0")
    _, values, lines = drawn(*argv)

    for one, line in zip(values, lines, strict=True):
        is_on = one["-p mixup"] == "mixup"
        assert ("mixup.alpha" in one) == is_on
        assert any(word.startswith("--mixup.alpha=") for word in line) == is_on
        assert ("-pmixup" in line, "-pno:mixup" in line) == (is_on, not is_on)
    assert len({one["-p mixup"] for one in values}) == 2


@pytest.mark.parametrize("choice", ["mixup,jsonl", "no:mixup,mixup,jsonl"])
def test_of_several_plugins_one_takes_part(tiny, choice):
    """Those that are installed would take part by themselves, so that all trials were the same."""
    _, values, lines = drawn("-p", choice, "--mixup.alpha", "0.1:1.0")

    for one, line in zip(values, lines, strict=True):
        chosen = one["-p mixup/jsonl"]
        assert ("mixup.alpha" in one) == (chosen == "mixup")
        for name in ("mixup", "jsonl"):
            assert (f"-p{name}" in line, f"-pno:{name}" in line) == (chosen == name, chosen != name)
    assert {one["-p mixup/jsonl"] for one in values} == {*choice.split(",")}


def test_what_is_fixed_is_said_of_a_plugin_that_is_on_alone(tiny):
    """Otherwise each trial without it would fail."""
    _, values, lines = drawn("-p=no:mixup,mixup", "--mixup.alpha", "0.3")

    for one, line in zip(values, lines, strict=True):
        assert ("--mixup.alpha=0.3" in line) == (one["-p mixup"] == "mixup")


def test_a_file_has_the_same_ranges_and_the_command_line_is_stronger(tiny):
    """16:32 is a time of day in YAML."""
    (tiny / "space.yaml").write_text(
        "task.lr: log:1e-4:1e-1\ntask.width: 16:32\nclip-norm: [none, 1.0]\n-p: no:mixup,mixup\n"
    )

    sweep, values, _ = drawn("--space", "space.yaml", "--task.lr", "0.1")

    assert [one.name for one in sweep.dimensions] == ["-p mixup", "task.width", "clip_norm"]
    assert all(16 <= int(one["task.width"]) <= 32 for one in values)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "nothing to search"),
        (("--task.lr", "0.1:0.01"), "first number isn't less"),
        (("--task.lr", "log:0:1"), "positive numbers"),
        (("--task.lr", "log:1:2:0.5"), "with no step"),
        (("--task.lr", "0:1:2"), "step doesn't fit"),
        (("--max-duration", "1ep:4ep"), "isn't of numbers"),
        (("--task.width", "4,4"), "there twice"),
        (("-p", "mixup,"), "no two alternatives"),
        (("--resume", "x,y"), "belongs to each trial"),
        (("--task.lr", "0:1", "--space", "none.yaml"), "can't be read"),
    ],
)
def test_what_can_not_be_searched_is_refused(tiny, argv, told):
    """Before the first trial, with what was written."""
    with pytest.raises(UsageError, match=told):
        sweep_of(*argv)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--task.lr", "log:a:b"), "'a' isn't of type float"),
        (("--task.width", "2,4,x"), "'x' isn't of type int"),
        (("--task.wdith", "2,4"), "task.width"),
        (("--precision", "fp32,fp33"), "fp33"),
    ],
)
def test_a_value_of_another_type_is_named(tiny, argv, told):
    """It would fail in the trial that draws it, perhaps the last."""
    with pytest.raises(SettingError, match=told):
        sweep_of(*argv)


def test_samplers_and_pruners_go_by_the_names_of_optuna(tiny):
    """With arguments, where they are given."""
    assert isinstance(make_sampler(None), optuna.samplers.TPESampler)
    assert isinstance(make_sampler("Random"), optuna.samplers.RandomSampler)
    assert isinstance(make_pruner("none"), optuna.pruners.NopPruner)
    assert isinstance(make_pruner("hyperband:min_resource=2"), optuna.pruners.HyperbandPruner)
    percentile = make_pruner("percentile:percentile=25.0,n_startup_trials=0")
    assert isinstance(percentile, optuna.pruners.PercentilePruner)


@pytest.mark.parametrize(
    ("text", "told"),
    [("medain", "the closest is 'median'"), ("median:steps=2", "steps"), ("base", "no pruner")],
)
def test_a_wrong_name_or_argument_is_told(text, told):
    """With those that there are."""
    with pytest.raises(UsageError, match=told):
        make_pruner(text)
