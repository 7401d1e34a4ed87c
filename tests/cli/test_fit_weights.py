"""`fit --weights` starts from weights, `fit --export --export-best` writes the best ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

FIT = ("fit", "tiny.py", "--no-plugins", "--max-duration", "1ep")


def same(first: str, second: str) -> bool:
    first_weights, second_weights = load_file(first), load_file(second)
    return all(torch.equal(one, second_weights[name]) for name, one in first_weights.items())


def test_a_fit_starts_from_a_file_of_weights(run, tiny):
    """With a learning rate of 0 it ends with them."""
    run(*FIT, "--export", "a.safetensors", "--seed", "1")

    ran = run(*FIT, "--weights", "a.safetensors", "--export", "b.safetensors", "--task.lr", "0")

    assert "weights: a.safetensors\n" in ran.out
    assert same("a.safetensors", "b.safetensors")


def test_a_fit_starts_from_the_best_checkpoint_of_a_run(run, followed):
    """`--best` takes it instead of the newest."""
    ran = run(*FIT, "--weights", "there", "--best")

    assert ran.status == 0
    assert "weights: there, the best of its checkpoints" in ran.out


def test_a_run_that_is_resumed_keeps_its_own_weights(run, tiny):
    """The line that began it is the line that continues it."""
    run(*FIT, "--export", "a.safetensors", "--seed", "1")
    line = (*FIT, "--weights", "a.safetensors", "--run-dir", "there")
    run(*line)

    ran = run(*line, "--max-duration", "2ep", "--allow-config-change")

    assert "weights: those of the resumed run, not a.safetensors" in ran.out
    assert "epoch 2/2" in ran.out


def test_weights_that_do_not_fit_stop_a_fit(run, tiny):
    """Before an hour of training from others."""
    run(*FIT, "--export", "a.safetensors")
    code = (tiny / "tiny.py").read_text()
    (tiny / "more.py").write_text(
        code.replace("Linear(3, hidden_size)", "Linear(3, hidden_size + 1)")
    )

    ran = run("fit", "more.py", *FIT[2:], "--weights", "a.safetensors")

    assert ran.status == 1
    assert "can't be loaded" in ran.err or "shape" in ran.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--weights", "m.safetensors"], "there is no file 'm.safetensors'"),
        (["--best"], "--best has no effect without --weights"),
        (["--not-strict"], "--not-strict has no effect without --weights"),
        (["--export-best"], "but --export isn't given"),
        (
            ["--export-best", "--export", "m.safetensors"],
            "no metric says which evaluation is the best",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused_before_training(argv, message, run, tiny):
    """Each says what is missing."""
    ran = run(*FIT, *argv)

    assert ran.status == 2
    assert message in ran.err
    assert "epoch 1/1" not in ran.out


@pytest.mark.parametrize("direction", ["min", "max"])
def test_the_best_weights_are_exported_by_a_flag(direction, run, tiny):
    """With the direction turned around, they are those of another evaluation."""
    options = ("--checkpoint-best", f"{direction} test/loss", "--run-dir", direction)

    ran = run("fit", "tiny.py", "--no-plugins", "--max-duration", "3ep", *options,
              "--export", "flag.safetensors", "--export-best")  # fmt: skip
    run("export", direction, "command.safetensors", "--best")

    assert (
        f"exported: flag.safetensors, the weights of the best evaluation by {direction}" in ran.out
    )
    assert same("flag.safetensors", "command.safetensors")
    run("export", direction, "newest.safetensors")
    assert same("flag.safetensors", "newest.safetensors") == (direction == "min")


def test_the_best_weights_are_exported_from_python(make_trainer, make_task, make_batches, clean):
    """The model has its own weights again afterwards."""
    task = make_task(eval_dataloaders={"test": make_batches(1)})
    trainer = make_trainer(task, checkpoint_best="max test/loss", max_duration="3ep")
    trainer.fit()
    before = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}

    best = load_file(trainer.export("best.safetensors", best=True))

    after = trainer.state.model.state_dict()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert not torch.equal(best["weight"], after["weight"].cpu())


def test_without_a_best_evaluation_none_is_exported(make_trainer, clean):
    """The last weights under the name of the best would be a lie."""
    with pytest.raises(Exception, match="no checkpoint of a best evaluation has been saved"):
        make_trainer().export("best.safetensors", best=True)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_get_the_mode_of_the_umask_and_a_format(umask, run, tiny):
    """Of `fit --export`, `predict --out` and `export` alike."""
    before = os.umask(umask)
    try:
        run(*FIT, "--export", "fit.safetensors", "--run-dir", "there")
        run("predict", "tiny.py", "--no-plugins", "--out", "predict.safetensors")
        run("export", "there", "export.safetensors")
    finally:
        os.umask(before)

    for name in ("fit", "predict", "export"):
        path = Path(f"{name}.safetensors")
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"


LOGS = """
from eventloop import hookimpl


class Writes:
    @hookimpl
    def log(self, state, numbers, at):
        state.run_dir.mkdir(parents=True, exist_ok=True)
        (state.run_dir / "numbers").write_text(str(numbers))

    @hookimpl
    def predict_end(self, state):
        state.run_dir.mkdir(parents=True, exist_ok=True)
        (state.run_dir / "predicted").touch()
"""


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_what_trains_nothing_leaves_no_run_folder(command, run, tiny):
    """A plugin that writes what it is told would leave one for each evaluation."""
    (tiny / "own.py").write_text(LOGS)

    ran = run(command, "tiny.py", "--no-plugins", "-p", "own.py:Writes")

    assert ran.status == 0
    assert "run dir:" not in ran.out
    assert not (tiny / "runs").exists()


def test_a_run_that_is_evaluated_is_written_into_where_it_is_named(run, tiny):
    """`--run-dir` names the folder."""
    run(*FIT, "--run-dir", "there")
    (tiny / "own.py").write_text(LOGS)

    ran = run("eval", "tiny.py", "--no-plugins", "-p", "own.py:Writes", "--run-dir", "there",
              "--allow-config-change")  # fmt: skip

    assert "run dir: there" in ran.out
    assert (tiny / "there/numbers").exists()
