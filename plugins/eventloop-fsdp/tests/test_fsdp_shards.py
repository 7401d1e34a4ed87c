"""Each rank of a sharded run writes its shards and reads what it needs; any other run goes on with them."""

from __future__ import annotations

import itertools
import os
import random
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Allowed, CheckpointError, Task
from eventloop.checkpoint import safetensors_files
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.manifest import read_manifest
from eventloop.checkpoint.store import Store
from eventloop.files import disk
from eventloop.toolbox import flatten
from eventloop_fsdp import Fsdp
from eventloop_testing import differences, isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

GLOBAL_BATCH = 12
X = torch.randn(144, 5, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.argmax(1))
ALLOWED = Allowed(config_change=True, missing_plugin=("fsdp",))


class Scaled(nn.Module):
    """A buffer, which isn't sharded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 33))

    def forward(self, hidden):
        return torch.tanh(hidden * self.scale)


def model():
    """Rows that no number of ranks shares evenly, a buffer, and a tensor smaller than four ranks."""
    return nn.Sequential(nn.Linear(5, 33), Scaled(), nn.Linear(33, 3), nn.Linear(3, 5))


def task(num_ranks):
    return Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(DATA, GLOBAL_BATCH // num_ranks, shuffle=True),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )


def fit(folder, until, *, num_ranks=1, sharded=True, **given):
    """Trains to a batch, saving every second; all ranks in one folder."""
    given = {"max_duration": until, "checkpoint_interval": "2ba", "allowed": ALLOWED} | given

    def one():
        plugins = [Fsdp()] if sharded and num_ranks > 1 else []
        with isolated_trainer(folder, task(num_ranks), algorithms=plugins, **given) as trainer:
            trainer.fit()

    if num_ranks == 1:
        one()
    else:
        run_ranks(one, world_size=num_ranks)


def last(folder) -> Path:
    return max((folder / "run" / "checkpoints").glob("ba*"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """The folder of a run of four ranks that has saved twice."""
    folder = tmp_path_factory.mktemp("four")
    fit(folder, "4ba", num_ranks=4)
    return folder


def test_each_rank_writes_its_shards(of_four):
    """None holds more than its share; the whole is what one process would have saved."""
    manifest = read_manifest(last(of_four))

    assert manifest.shards == {"model": 4, "optimizers": 4}
    sizes = [manifest.files[name].num_bytes for name in manifest.shards_of("optimizers")]
    assert max(sizes) < 0.4 * sum(sizes)
    weights = read_checkpoint(last(of_four)).parts["model"]
    assert {name: one.shape for name, one in weights.items()} == {
        name: one.shape for name, one in model().state_dict().items()
    }


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [(4, 2, 3, 1, 4), (1, 3, 2), (2, 4)])
def test_any_number_of_ranks_goes_on_with_what_another_saved(tmp_path, ranks):
    """Of the same global batch, the weights are those of a run in one go to 1e-6."""
    fit(tmp_path / "one", f"{2 * len(ranks)}ba", num_ranks=ranks[0])
    for idx, num_ranks in enumerate(ranks):
        fit(tmp_path / "several", f"{2 * (idx + 1)}ba", num_ranks=num_ranks)

    expected, actual = (read_checkpoint(last(tmp_path / name)).parts for name in ("one", "several"))
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(actual["model"][name], tensor, rtol=0, atol=1e-6)
    first, second = (one["optimizers"]["adamw"]["state"] for one in (expected, actual))
    for idx, state in first.items():
        torch.testing.assert_close(second[idx]["exp_avg"], state["exp_avg"], rtol=0, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_as_many_ranks_go_on_with_the_same_bits(tmp_path, num_ranks):
    """Shards are read as they were written."""
    fit(tmp_path / "in one go", "6ba", num_ranks=num_ranks)
    for until in ("2ba", "6ba"):
        fit(tmp_path / "stopped", until, num_ranks=num_ranks)

    expected, actual = (
        read_checkpoint(last(tmp_path / name)).parts for name in ("in one go", "stopped")
    )
    assert list(differences(expected["model"], actual["model"])) == []
    assert list(differences(expected["optimizers"], actual["optimizers"])) == []


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [(True, False), (False, True)])
def test_shards_and_copies_go_on_with_each_other(tmp_path, sharded):
    """DDP reads shards, and FSDP reads whole tensors."""
    fit(tmp_path / "one", "4ba", num_ranks=2)
    for until, is_sharded in zip(("2ba", "4ba"), sharded, strict=True):
        fit(tmp_path / "two", until, num_ranks=2, sharded=is_sharded)

    expected, actual = (
        read_checkpoint(last(tmp_path / name)).parts["model"] for name in ("one", "two")
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)


def test_a_rank_that_goes_on_reads_its_share_alone(tmp_path, of_four):
    """Twice, to verify it and to use it; the first rank reads all headers on top."""
    shards = {path: path.stat().st_size for path in last(of_four).glob("*-0000?.safetensors")}

    def resume():
        num_bytes = {"digested": 0, "placed": 0}
        opened, fill, fill_at = disk.OldFile.__init__, disk.OldFile.fill, disk.OldFile.fill_at

        def noted(self, path):
            self.path = path
            opened(self, path)

        def counted_fill(self, buffer):
            num_bytes["digested"] += len(buffer) if self.path in shards else 0
            fill(self, buffer)

        def counted_fill_at(self, buffer, position):
            num_bytes["placed"] += len(buffer)
            fill_at(self, buffer, position)

        disk.OldFile.__init__ = noted
        disk.OldFile.fill, disk.OldFile.fill_at = counted_fill, counted_fill_at
        given = {"resume": str(last(of_four)), "max_duration": "4ba", "allowed": ALLOWED}
        with isolated_trainer(
            tmp_path, task(4), algorithms=[Fsdp()], checkpoint_interval=None, **given
        ):
            return num_bytes

    found = run_ranks(resume, world_size=4)

    tensors, _ = flatten(read_checkpoint(last(of_four), ["model", "optimizers"]).parts, "")
    total = sum(one.nbytes for one in tensors.values())
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in shards)
    for rank, one in enumerate(found):
        assert 0.1 * total < one["placed"] < 0.4 * total
        assert one["digested"] < 0.5 * sum(shards.values()) + (0 if rank else headers)
    assert sum(one["digested"] for one in found) >= sum(shards.values())


def test_weights_alone_are_read_and_exported_by_shards(tmp_path, of_four):
    """A rank loads its slices of them; what is exported is whole."""

    def export():
        with isolated_trainer(
            tmp_path, task(2), algorithms=[Fsdp()], checkpoint_interval=None
        ) as trainer:
            trainer.load_weights(last(of_four))
            trainer.export(tmp_path / "model.safetensors")

    run_ranks(export)

    expected = read_checkpoint(last(of_four)).parts["model"]
    assert list(differences(expected, load_file(tmp_path / "model.safetensors"))) == []


@pytest.mark.nightly
def test_folders_that_are_not_shared_are_found_before_training(tmp_path):
    """As those of two machines with a disk each are."""

    def train():
        folder = tmp_path / os.environ["RANK"]
        given = {"algorithms": [Fsdp()], "checkpoint_interval": "2ba"}
        with isolated_trainer(folder, task(2), **given) as trainer:
            trainer.fit()

    with pytest.raises(RankError, match=r"rank 1 on '.*' doesn't see what rank 0 on"):
        run_ranks(train, timeout_s=60)

    assert not [*tmp_path.glob("*/run/checkpoints/[!.]*")]


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [True, False])
def test_checkpoints_at_a_url(tmp_path, shared):
    """Each rank uploads its slices, whether the ranks have a folder in common or not."""
    url = f"file://{tmp_path}/bucket/run"

    def train(until):
        machine = tmp_path / ("machine" if shared else os.environ["RANK"])
        os.environ |= {} if shared else {"LOCAL_RANK": "0"}
        machine.mkdir(exist_ok=True)
        os.chdir(machine)
        given = {"run_dir": url, "max_duration": until, "checkpoint_interval": "2ba"}
        with isolated_trainer(
            machine, task(2), algorithms=[Fsdp()], allowed=ALLOWED, **given
        ) as one:
            one.fit()
            return one.state.clock.batch, one.export(machine / "model.safetensors")

    run_ranks(train, "2ba")
    (batch, exported), _ = run_ranks(train, "4ba")

    saved = max((tmp_path / "bucket" / "run" / "checkpoints").glob("ba00000004*"))
    assert batch == 4
    assert [*read_manifest(saved).shards.values()] == [2, 2]
    assert not [*tmp_path.glob("[0-9m]*/runs/*/*/checkpoints/.tmp-*")]
    assert list(differences(read_checkpoint(saved).parts["model"], load_file(exported))) == []


@pytest.mark.nightly
def test_what_is_damaged_is_passed_over_by_all_ranks(tmp_path):
    """Each reads a share of the shards before anything is built; the one before is gone on from."""
    fit(tmp_path, "4ba", num_ranks=2)
    damaged = last(tmp_path)
    shard = damaged / read_manifest(damaged).shards_of("optimizers")[1]
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(data)

    def resume():
        given = {"max_duration": "6ba", "checkpoint_interval": "2ba", "allowed": ALLOWED}
        with isolated_trainer(tmp_path, task(2), algorithms=[Fsdp()], **given) as trainer:
            return trainer.notes, trainer.state.clock.batch

    for notes, batch in run_ranks(resume):
        assert batch == 2
        assert any(shard.name in one and "isn't used" in one for one in notes)


@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [True, False])
def test_one_that_is_named_is_verified_too(tmp_path, sharded):
    """No rank reads slices of what no rank has digested."""
    fit(tmp_path / "first", "2ba", num_ranks=2, sharded=sharded)
    damaged = last(tmp_path / "first")
    file = damaged / ("model-00001.safetensors" if sharded else "model.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)

    with pytest.raises(RankError, match=rf"CheckpointError: .*can't be used: {file.name}"):
        fit(tmp_path / "second", "4ba", num_ranks=2, sharded=sharded, resume=str(damaged))


@pytest.mark.nightly
def test_old_shards_make_room_for_new_ones(tmp_path):
    """Those that stay verify."""
    fit(tmp_path, "8ba", num_ranks=2, checkpoint_keep=2)

    there = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [one.name for one in there] == ["ba00000006", "ba00000008"]
    for one in there:
        read_checkpoint(one)


# What changes the disk; to wait for it doesn't change what the next process finds.
@pytest.fixture
def overlapping(monkeypatch):
    """Lets rank 1 say of its rows of a weight that they begin with the last one of rank 0."""
    places_of = safetensors_files._places_of

    def wrong(slices):
        if os.environ.get("RANK") == "1":
            slices = {
                name: replace(one, offsets=(one.offsets[0] - 1, *one.offsets[1:]))
                if one.shape == (33, 5)
                else one
                for name, one in slices.items()
            }
        return places_of(slices)

    monkeypatch.setattr(safetensors_files, "_places_of", wrong)


def resumed(folder):
    """Goes on with a run on two ranks; returns where each went on from, or its error."""

    def one():
        try:
            given = {"algorithms": [Fsdp()], "max_duration": "8ba", "allowed": ALLOWED}
            with isolated_trainer(folder, task(2), **given) as trainer:
                return trainer.state.clock.batch
        except CheckpointError as error:
            return str(error)

    return run_ranks(one, timeout_s=60)


@pytest.mark.nightly
def test_two_ranks_refuse_a_checkpoint_whose_slices_overlap_with_one_message(tmp_path, overlapping):
    """One alone would go on, with memory that was never written, or wait for the other."""
    fit(tmp_path, "2ba", num_ranks=2)

    first, second = resumed(tmp_path)

    assert "none of the 2 checkpoints" in first
    assert "two slices of '0.weight' overlap" in first
    assert second == first


@pytest.mark.nightly
def test_two_ranks_go_on_from_the_checkpoint_before_overlapping_slices(tmp_path, request):
    """Both from the same one: it is rank 0 that chooses, by what either has found."""
    fit(tmp_path, "2ba", num_ranks=2)
    request.getfixturevalue("overlapping")
    fit(tmp_path, "4ba", num_ranks=2)
    assert last(tmp_path).name == "ba00000004"

    assert resumed(tmp_path) == [2, 2]


CHANGES = ("make_folder", "create", "write", "rename", "remove_file", "remove_empty")


def die_at(num_left):
    """Ends this process at its so many-th change of the disk; halfway, where that is a write."""

    def dying(name, function):
        def operate(*arguments, **given):
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                if name == "write":
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **given)

        return operate

    for name in CHANGES:
        setattr(disk, name, dying(name, getattr(disk, name)))


def killed(folder, num_ranks, victim, kill_at):
    """Goes on with a run until a rank is killed; gives whether it was."""

    def one():
        if int(os.environ["RANK"]) == victim:
            die_at(kill_at)
        given = {"max_duration": "8ba", "checkpoint_interval": "2ba", "checkpoint_keep": 1}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing to train")  # killed after its last save
            plugins = [Fsdp()]
            with isolated_trainer(
                folder, task(num_ranks), algorithms=plugins, allowed=ALLOWED, **given
            ) as trainer:
                trainer.fit()

    try:
        run_ranks(one, world_size=num_ranks)
    except RankError as error:
        # Or the first of the others that was left alone in the middle of something.
        if "died" not in str(error) and "onnection" not in str(error):
            raise
        return True
    return False


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_ranks", "num_kills"), [(2, 4), pytest.param(4, 20, marks=pytest.mark.nightly)]
)
def test_killed_while_it_saves_it_ends_with_the_same_bits(tmp_path, num_ranks, num_kills):
    """Each rank in turn, in a save, a prune, or the start; the newest checkpoint never goes back."""
    whole, draw = tmp_path / "whole", random.Random(num_ranks)
    assert not killed(whole, num_ranks, victim=-1, kill_at=0)
    num_done = 0
    for round_ in itertools.count():
        folder, newest = tmp_path / str(round_), -1
        store = Store(folder / "run" / "checkpoints")
        while num_done < num_kills:
            victim = num_done % num_ranks
            # Rank 0 writes the most; some have the run go on for a save or two.
            if not killed(folder, num_ranks, victim, draw.randrange(70 if victim == 0 else 16)):
                break
            num_done += 1
            latest, refused = store.latest()
            assert refused == []
            batch = -1 if latest is None else int(latest.name.partition("ba")[2][:8])
            assert batch >= newest
            newest = batch
        assert not killed(folder, num_ranks, victim=-1, kill_at=0)
        expected, actual = (read_checkpoint(last(one)).parts for one in (whole, folder))
        assert list(differences(expected, actual)) == []
        if num_done == num_kills:
            return
