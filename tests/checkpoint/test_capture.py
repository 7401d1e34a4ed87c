"""What `state.capture()` collects, and a run that goes on from what another owner wrote of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eventloop import CheckpointError, PluginError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.run.differences import Allowed
from eventloop_testing import case, run_ranks
from eventloop_testing.case import isolated_trainer, tiny_task


class Owner:
    """An algorithm that writes checkpoints where it likes."""

    name = "owner"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @hookimpl
    def save_checkpoint(self, state):
        path = self.folder / f"mine-{state.clock.batch}"
        parts, facts = state.capture()
        if state.rank == 0 and not path.exists():
            write_checkpoint(path, parts, facts, batch=state.clock.batch)
        return path


def test_an_owner_of_save_checkpoint_has_what_one_holds(tmp_path):
    """Elsewhere, in the same format, and a run goes on from it to the same end."""
    given = {"checkpoint_interval": "2ba", "max_duration": "2ep"}
    algorithms = [Owner(tmp_path)]
    with isolated_trainer(tmp_path / "one", algorithms=algorithms, **given) as trainer:
        trainer.fit()
        weights = trainer.state.model.state_dict()
    own = read_checkpoint(tmp_path / "mine-4")
    with isolated_trainer(tmp_path / "two", **given | {"checkpoint_keep": None}) as trainer:
        trainer.fit()
    core = read_checkpoint(tmp_path / "two" / "run" / "checkpoints" / "ba00000004")

    given["resume"] = str(tmp_path / "mine-4")
    with isolated_trainer(tmp_path / "three", algorithms=algorithms, **given) as trainer:
        trainer.fit()
        torch.testing.assert_close(trainer.state.model.state_dict(), weights, rtol=0, atol=0)

    assert not (tmp_path / "one" / "run" / "checkpoints").exists()
    assert list(differences(own.parts, core.parts)) == []
    assert own.facts["moment"]["batch"] == 4


def test_all_ranks_take_part_in_a_capture(tmp_path):
    """What a rank alone knows is in it."""

    def fit_with_owner():
        given = {"checkpoint_interval": "2ba", "max_duration": "2ep"}
        with isolated_trainer(tmp_path, algorithms=[Owner(tmp_path)], **given) as trainer:
            trainer.fit()

    run_ranks(fit_with_owner)

    parts = read_checkpoint(tmp_path / "mine-4").parts
    assert {"rank0", "rank1"} <= parts.keys()


def test_what_a_rank_alone_knows_goes_to_rank_zero_and_no_further(tmp_path):
    """Of 1,024 ranks it is 21 MiB, which the other 1,023 have no use for."""

    class Captures:
        name = "captures"

        @hookimpl
        def fit_start(self, state):
            parts = state.capture().parts
            self.ranks = [name for name in parts if name.startswith("rank")]
            self.first = parts.get("rank0", {}).get("generators", {}).keys()

    def captured():
        captures = Captures()
        with isolated_trainer(tmp_path, algorithms=[captures]) as trainer:
            trainer.fit()
        return captures.ranks, list(captures.first)

    zero, one, two = run_ranks(captured, world_size=3)

    of_device = [] if case.default_device == "cpu" else ["device"]
    assert zero == (["rank0", "rank1", "rank2"], ["host", "named", *of_device])
    assert one == two == ([], [])


def test_half_a_batch_can_not_be_captured(tmp_path):
    """It would be a checkpoint that nothing can go on from."""

    class TooSoon:
        name = "too-soon"

        @hookimpl
        def batch_start(self, state):
            state.capture()

    with isolated_trainer(tmp_path, algorithms=[TooSoon()]) as trainer:
        with pytest.raises(PluginError, match="half of it"):
            trainer.fit()


def test_a_callback_captures_nothing(tmp_path):
    """All ranks would have to take part, and a callback may well be on one alone."""

    class Asks:
        name = "asks"

        @hookimpl
        def epoch_end(self, state):
            state.capture()

    with isolated_trainer(tmp_path, callbacks=[Asks()]) as trainer:
        with pytest.raises(PluginError, match="isn't available to a callback"):
            trainer.fit()


def test_a_run_may_be_resumed_without_the_owner_of_its_checkpoints(tmp_path):
    """Control: what it wrote is a checkpoint like any other."""
    given = {"checkpoint_interval": "2ba", "max_duration": "2ep"}
    with isolated_trainer(tmp_path / "one", algorithms=[Owner(tmp_path)], **given) as trainer:
        trainer.fit()

    given |= {"resume": str(tmp_path / "mine-4"), "allowed": Allowed(missing_plugin=("owner",))}
    with isolated_trainer(tmp_path / "two", **given) as trainer:
        trainer.fit()

        assert trainer.state.clock.batch == 6


@pytest.mark.about_cpu  # where no copy is made
def test_a_tensor_that_could_not_be_loaded_is_not_saved(tmp_path):
    """Entries that share memory can't be written into."""

    def model():
        made = nn.Linear(3, 3)
        made.register_buffer("scale", torch.ones(1).expand(3))
        return made

    with isolated_trainer(tmp_path, tiny_task(model=model), checkpoint_interval="1ep") as trainer:
        with pytest.raises(CheckpointError, match="'scale' of the model can't be saved"):
            trainer.fit()
