"""Attacks on promise B: gradients and weights that aren't finite, in all ways, at all moments."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DDP wants it, and each rank, a fork, would take seconds for it
from torch import nn

from eventloop import Allowed, hookimpl
from eventloop.checkpoint.locations import checkpoint_at
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError, NonFiniteError, ResumeError
from eventloop_testing import isolated_trainer, run_ranks

LENGTH = 12  # batches; a checkpoint is saved after every fourth


class Spoils:
    """A callback that spoils a run at one batch, counted from 1, on one rank."""

    name = "spoils"

    def __init__(self, how: str, batch: int, rank: int = 0) -> None:
        self.how, self.batch, self.rank = how, batch, rank

    def is_now(self, state, done: int) -> bool:
        return state.rank == self.rank and state.clock.batch == self.batch - done

    @hookimpl
    def after_loss(self, state):
        if self.is_now(state, 1) and self.how == "loss":
            state.loss.data.fill_(math.nan)

    @hookimpl
    def before_backward(self, state):
        if self.is_now(state, 1) and self.how == "a hook on gradients":
            weight = state.model[0].weight
            handle = weight.register_hook(lambda gradient: handle.remove() or gradient * math.nan)

    @hookimpl
    def after_train_batch(self, state):
        if self.is_now(state, 1) and self.how in SPOILT_GRADIENTS:
            state.model[0].weight.grad[0, 0] = SPOILT_GRADIENTS[self.how]

    @hookimpl
    def batch_end(self, state):
        if self.is_now(state, 0) and self.how == "weights":
            with torch.no_grad():
                state.model[0].bias[0] = math.nan


SPOILT_GRADIENTS = {"NaN in .grad": math.nan, "inf in .grad": math.inf}
WAYS = ["a hook on gradients", *SPOILT_GRADIENTS, "weights"]
MOMENTS = {"with a save right after": 8, "in between": 6, "at the last step": LENGTH}


@pytest.fixture
def trainer_of(tmp_path):
    """Builds trainers of one run with a checkpoint every four batches, spoilt or not."""

    def trainer_of(*spoilers, run="run", **given):
        settings = {
            "max_duration": f"{LENGTH}ba",
            "checkpoint_interval": "4ba",
            "eval_interval": None,
            "run_dir": tmp_path / run,
        } | given
        return isolated_trainer(tmp_path, callbacks=spoilers, **settings)

    return trainer_of


def weights_after_fit(trainer):
    with trainer:
        trainer.fit()
        return {name: one.clone() for name, one in trainer.state.model.state_dict().items()}


def marked(run_dir: Path) -> dict[int, str]:
    """Returns why each checkpoint of a run is passed over, by its batch."""
    return {one.batch: one.reason for one in Store(run_dir / "checkpoints").found(digests=True)}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "how", [WAYS[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in WAYS[1:])]
)
def test_a_spoilt_run_fails_and_goes_on_from_its_last_finite_checkpoint(
    how, moment, trainer_of, tmp_path
):
    """It ends as if nothing had been; the checkpoint that isn't finite stays, and is named."""
    expected = weights_after_fit(trainer_of(run="undisturbed"))
    with pytest.raises(NonFiniteError), trainer_of(Spoils(how, MOMENTS[moment])) as trainer:
        trainer.fit()
    reasons = marked(tmp_path / "run")

    again = trainer_of()
    notes = "\n".join(again.notes)
    actual = weights_after_fit(again)

    spoilt = [batch for batch, reason in reasons.items() if reason]
    assert spoilt == ([] if moment == "in between" else [MOMENTS[moment]])
    assert all(f"ba{one:08} isn't used: its weights aren't finite" in notes for one in spoilt)
    assert all(torch.equal(actual[name], one) for name, one in expected.items())


@pytest.mark.parametrize("how", WAYS)
def test_without_checkpoints_no_fit_ends_well_on_weights_that_arent_finite(how, trainer_of):
    """Whoever exports afterwards would export NaN."""
    given = {"run": "none", "checkpoint_interval": None}

    with (
        pytest.raises(NonFiniteError, match=r"a batch of 1 to 12|at batch 12"),
        trainer_of(Spoils(how, LENGTH), **given) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_keeps_the_last_finite_checkpoint(keep, trainer_of, tmp_path):
    """However many that aren't finite follow it: of these, the newest stays to be looked at."""
    spoils = Spoils("NaN in .grad", 5)
    given = {"on_bad_loss": "ignore", "checkpoint_keep": keep, "checkpoint_interval": "2ba"}

    with pytest.warns(UserWarning, match="aren't finite"), trainer_of(spoils, **given) as trainer:
        trainer.fit()

    finite = [4] if keep == 1 else [2, 4]
    assert sorted(marked(tmp_path / "run")) == [*finite, LENGTH]


def test_one_that_isnt_finite_is_never_the_best(trainer_of, tmp_path):
    """A metric can be finite where the weights aren't: that of a class that is always the first."""
    spoils = Spoils("weights", 6)
    best = {"checkpoint_best": "min test/accuracy", "eval_interval": "2ba"}
    given = {"on_bad_loss": "ignore", "checkpoint_keep": 1, "checkpoint_interval": "100ba"}

    trainer = trainer_of(spoils, **best, **given)
    with pytest.warns(UserWarning, match="aren't finite"):
        weights_after_fit(trainer)
    known = trainer._run.best_weights._saver.state_dict()

    assert known["batch"] < 6
    assert known["batch"] in marked(tmp_path / "run")


def test_a_named_checkpoint_that_isnt_finite_is_refused_unless_bad_losses_are_ignored(
    trainer_of, tmp_path
):
    """Nothing can be learned from it; a person who looks into it may go on."""
    with pytest.raises(NonFiniteError), trainer_of(Spoils("weights", 8)) as trainer:
        trainer.fit()
    named = {"run": "second", "resume": str(tmp_path / "run" / "checkpoints" / "ba00000008")}

    with pytest.raises(ResumeError, match="aren't finite, so training can't continue"):
        trainer_of(**named)
    with pytest.raises(ResumeError, match="can't resume from ba00000008: its weights"):
        trainer_of(resume=named["resume"])
    given = {"on_bad_loss": "ignore", "allowed": Allowed(config_change=True)}
    with trainer_of(**named, **given) as trainer:
        assert "ba00000008: its weights aren't finite" in trainer.notes


def test_where_none_is_finite_the_run_is_refused(tmp_path, trainer_of):
    """To begin anew by itself would hide that all was lost."""
    given = {"on_bad_loss": "ignore", "checkpoint_keep": 1}
    with pytest.warns(UserWarning, match="aren't finite"):
        weights_after_fit(trainer_of(Spoils("weights", 1), **given))
    for one in (tmp_path / "run" / "checkpoints").glob("ba00000000"):
        one.rename(tmp_path / "away")

    with pytest.raises(CheckpointError, match="can't be used"):
        trainer_of()


def test_a_checkpoint_that_doesnt_say_may_be_gone_on_from(trainer_of, tmp_path, monkeypatch):
    """Those of older versions don't."""
    monkeypatch.setattr("eventloop.checkpoint.saver.are_finite", lambda *_: None)
    weights_after_fit(trainer_of())

    assert set(marked(tmp_path / "run").values()) == {""}


def test_weights_that_arent_finite_are_not_exported(trainer_of, tmp_path):
    """Neither by a trainer nor by the command; with on_bad_loss="ignore" with a warning."""
    target = tmp_path / "model.safetensors"
    with pytest.raises(NonFiniteError), trainer_of(Spoils("weights", 8)) as trainer:
        trainer.fit()
    with trainer_of(run="other") as trainer:
        nn.init.constant_(trainer.state.model[0].bias, math.inf)
        with pytest.raises(NonFiniteError, match=r"'0\.bias' isn't finite"):
            trainer.export(target)
    assert not target.exists()

    checkpoint = tmp_path / "run" / "checkpoints" / "ba00000008"
    ran = eventloop("export", checkpoint, target)
    assert ran.returncode == 4
    assert "ba00000008 isn't exported: its weights aren't finite" in ran.stderr
    assert eventloop("export", tmp_path / "run", target).returncode == 0
    with trainer_of(run="ignoring", on_bad_loss="ignore") as trainer:
        nn.init.constant_(trainer.state.model[0].bias, math.inf)
        with pytest.warns(UserWarning, match=r"'0\.bias' is the first"):
            trainer.export(target)


def test_the_commands_mark_it(trainer_of, tmp_path):
    """It verifies, for its bytes are what was written; that it isn't used is said beside."""
    with pytest.raises(NonFiniteError), trainer_of(Spoils("weights", 8)) as trainer:
        trainer.fit()

    listed = eventloop("checkpoints", tmp_path / "run").stdout.splitlines()
    verified = eventloop("checkpoints", "verify", tmp_path / "run")

    (row,) = (line for line in listed if line.startswith("ba00000008"))
    assert row.split()[-4:] == ["its", "weights", "aren't", "finite"]
    assert " yes " in row
    assert verified.returncode == 0
    assert (
        "ba00000008: verified, but no run resumes from it by default: its weights aren't"
        in verified.stdout
    )


def eventloop(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eventloop", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", [*WAYS[:3], "loss"])
@pytest.mark.parametrize("clip_norm", [None, 1e6])
def test_the_batch_that_is_named_is_the_batch(how, clip_norm, trainer_of):
    """With clipping the norm tells; else both batches that may be to blame are named."""
    spoils = Spoils(how, 6)
    given = {"clip_norm": clip_norm, "checkpoint_interval": None, "run": "long"}

    with (
        pytest.raises(NonFiniteError) as caught,
        trainer_of(spoils, **given, max_duration="40ba") as trainer,
    ):
        trainer.fit()

    text = str(caught.value)
    if how == "loss":
        assert text.startswith("the loss is nan at epoch 2, batch 6\n")
    elif clip_norm is None:
        assert "suspects    batch 7, or the gradients of batch 6, whose loss was finite" in text
    elif how == "a hook on gradients":
        assert text.startswith("the gradients aren't finite at batch 6, nor is the loss after")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["loss", "a hook on gradients"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_and_batch_that_are_named_are_those(how, culprit, tmp_path):
    """Gradients are averaged, so that a batch later all ranks have what one brought."""

    def train():
        spoils, given = Spoils(how, 13, culprit), {"max_duration": "40ba", "clip_norm": 1e6}
        with isolated_trainer(tmp_path, callbacks=[spoils], **given) as trainer:
            try:
                trainer.fit()
            except NonFiniteError as error:
                return error.what
        return "nothing"

    one, other = run_ranks(train)

    assert one == other
    if how == "loss":
        assert one.startswith(f"rank {culprit}: the loss is nan at epoch ")
        assert one.endswith("batch 13")
    else:
        assert one.startswith("rank 0: the gradients aren't finite at batch 13, ")


def test_a_finite_run_is_left_alone(trainer_of, tmp_path):
    """Control: nothing is raised, marked or passed over."""
    weights_after_fit(trainer_of(Spoils("nothing", 1), clip_norm=1.0))

    assert set(marked(tmp_path / "run").values()) == {""}
    assert checkpoint_at(tmp_path / "run")[1] == []
