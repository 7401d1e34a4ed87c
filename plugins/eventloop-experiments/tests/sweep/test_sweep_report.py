"""What came of a sweep."""

from pathlib import Path

import optuna
import pytest
import yaml

from eventloop.commands import prepare, read_arguments
from eventloop_experiments.sweep.report import draw, write_best
from eventloop_experiments.sweep.sweep_request import COMMAND, read_command_line, read_sweep

WATCH = """
from eventloop import hookimpl

class Watch:
    @hookimpl
    def fit_start(self, state): pass
"""
TYPED = """
import enum

class Color(enum.Enum):
    RED = 1
    BLUE = 2

def task(width: int = 1, color: Color = Color.BLUE, betas: tuple[float, float] = (0.9, 0.99)):
    pass
"""


def best_file(*argv):
    """Returns what is written for the best trial, and the job that is read back from it."""
    sweep = read_sweep(*read_command_line([*argv, "--task.width", "2,4", "--run-dir", "here"]))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask()
    sweep.suggested(trial)
    study.tell(trial, 0.5)
    Path("here").mkdir()
    write_best(sweep, study)
    content = yaml.safe_load(Path("here/best.yaml").read_text())
    job = prepare(read_arguments([argv[0], "--config", "here/best.yaml"], COMMAND), COMMAND)
    return content, job, trial.params


def test_an_empty_file_is_one_that_says_nothing(tiny):
    """A template with everything commented out stopped the sweep after all its trials."""
    (tiny / "run.yaml").write_text("# nothing\n")

    content, _, params = best_file("tiny.py", "--config", "run.yaml")

    assert content == {"task": {"width": int(params["task.width"])}}


def test_plugins_of_a_file_are_found_from_the_folder_of_the_sweep(tiny):
    """Their paths are relative to the file that names them."""
    (tiny / "watch.py").write_text(WATCH)
    (tiny / "run.yaml").write_text("plugins: ['./watch.py:Watch']\nmixup: {alpha: 0.3}\n")

    content, job, _ = best_file("tiny.py", "--config", "run.yaml", "--progress.interval-s=0.2")

    assert content["plugins"] == [f"{tiny.resolve()}/watch.py:Watch"]
    assert (content["mixup"], content["progress"]) == ({"alpha": 0.3}, {"interval_s": 0.2})
    assert "watch" in [one.found.name for one in job.plugins]


def test_the_trial_is_stronger_than_the_file_in_any_spelling(tiny):
    """A key in two sections or spellings would be read as the file's, or not at all."""
    (tiny / "run.yaml").write_text(
        "max-duration: 1ep\nTask: {width: 9}\nprogress: {interval-s: 0.3}\n"
    )

    content, job, params = best_file(
        "tiny.py", "--config", "run.yaml", "--max-duration=2ep", "--progress.interval-s", "0.1"
    )

    assert content == {
        "max_duration": "2ep",
        "task": {"width": int(params["task.width"])},
        "plugins": {"progress": {"interval_s": 0.1}},
    }
    assert str(job.configuration.setting("max_duration")) == "2ep"


def test_lists_of_plugins_are_those_of_all_files(tiny):
    """A list takes the place of a weaker file's, so that it has to hold that, too."""
    (tiny / "pyproject.toml").write_text("[tool.eventloop]\nrequired = ['mixup>=0.0.1']\n")
    (tiny / "run.yaml").write_text("disable: [jsonl, progress]\n")
    argv = ("tiny.py", "--config=run.yaml", "-p", "no:progress,progress")

    content, job, params = best_file(*argv)

    is_on = params["-p progress"] == "progress"
    assert content["disable"] == ["jsonl", *["progress"] * (not is_on)]
    assert content["required"] == [*["progress"] * is_on, "mixup>=0.0.1"]
    names = {one.found.name for one in job.plugins}
    assert ("jsonl" in names, "progress" in names) == (False, is_on)


def test_a_sweep_without_plugins_is_repeated_without_them(tiny):
    """Not even those that the project requires, which `--no-plugins` leaves out."""
    (tiny / "pyproject.toml").write_text("[tool.eventloop]\nrequired = ['mixup']\n")

    content, job, _ = best_file("tiny.py", "--no-plugins")

    assert (content["autoload"], content["required"]) == (False, [])
    assert job.plugins == ()


def test_values_of_any_type_are_read_back(tiny):
    """An Enum and a tuple are no values of YAML."""
    (tiny / "typed.py").write_text(TYPED)

    _, job, params = best_file("typed.py", "--task.color", "RED", "--task.betas=[0.8,0.9]")

    options = job.task_options()
    assert (options["color"].name, options["betas"]) == ("RED", (0.8, 0.9))
    assert options["width"] == int(params["task.width"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_plot_is_one_picture_where_it_was_asked_for(tmp_path):
    """As the other commands draw theirs."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    path = tmp_path / "sweep.png"
    assert not draw(study, path)

    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)

    assert draw(study, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
