"""Sharded ranks train what one process would, on real gloo processes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torchmetrics import SumMetric

from eventloop import PluginError, Task, hookimpl
from eventloop.checkpoint.capture import restore_model
from eventloop.checkpoint.states import read_states
from eventloop.data import collated
from eventloop.toolbox import gathered
from eventloop.training.sharded_tensors import sliced
from eventloop_check import HostReads
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


class Net(nn.Module):
    """Two blocks that repeat, between layers that don't."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for block, layer in zip(self.blocks, self.layers, strict=True):
            hidden = hidden + layer(block(hidden))
        return self.head(hidden)


def trainer_of(folder, *plugins, batch_size=8, optimizer="sgd", task=None, **settings):
    given = {
        "model": Net,
        "loss": cross_entropy,
        "train_dataloader": DataLoader(TensorDataset(X, Y), batch_size),
        "optimizer": OPTIMIZERS[optimizer],
    } | (task or {})
    settings = {"max_duration": "3ep", **settings}
    return isolated_trainer(folder, Task(**given), algorithms=plugins, **settings)


@pytest.fixture
def fit(tmp_path):
    """Trains three epochs over 48 samples; gives the weights as exported, and the history."""
    numbers = itertools.count()

    def fit(*plugins, **given):
        folder = tmp_path / str(next(numbers))
        with trainer_of(folder, *plugins, **given) as trainer:
            result = trainer.fit()
            path = trainer.export(folder / "model.safetensors")
        return load_file(path) if path.exists() else {}, result.history

    return fit


def sharded(fit, world_size=2, options=None, **given):
    """Trains on several ranks with the plugin; gives what rank 0 gives."""
    return run_ranks(lambda: fit(Fsdp(**(options or {})), **given), world_size=world_size)[0]


def whole(state, weights):
    """Puts the slices of all ranks together, on rank 0."""
    return gathered(weights, state.all_gather, keep=state.rank == 0)


def assert_near(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name].cpu(), tensor.cpu(), rtol=0, atol=tolerance)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "microbatches", "world_size"),
    [("sgd", 1, 2), ("sgd", 4, 2), ("adamw", 1, 2), ("adamw", 4, 2), ("adamw", 4, 3)],
)
def test_shards_end_with_the_weights_of_one_process(fit, optimizer, microbatches, world_size):
    """Gradients are averaged over the global batch and clipped by the norm of all shards."""
    shared = {"optimizer": optimizer, "clip_norm": 0.05, "clip_value": 0.04}
    expected, history = fit(batch_size=24, microbatch_size=24 // microbatches, **shared)
    size = 24 // world_size

    actual, theirs = sharded(
        fit, world_size, batch_size=size, microbatch_size=size // microbatches, **shared
    )

    assert_near(actual, expected)
    assert theirs[-1]["train/loss"] == pytest.approx(history[-1]["train/loss"], abs=1e-6)


@pytest.mark.nightly
def test_another_global_batch_ends_elsewhere(fit):
    """Control: the comparison sees that half of the samples are missing."""
    expected, _ = fit(batch_size=16)
    actual, _ = sharded(fit, batch_size=4)

    with pytest.raises(AssertionError):
        assert_near(actual, expected)


class Twice:
    """Asks for the gradient twice before each step."""

    name = "twice"

    @hookimpl
    def optimizer_step(self, state, optimizers, closure):
        closure()
        for optimizer in optimizers.values():
            optimizer.step()
        return True


@pytest.mark.nightly
def test_a_closure_gives_the_same_gradient(fit):
    """It calls no events, and still exchanges gradients on the last microbatch."""
    expected, _ = fit(batch_size=16, microbatch_size=4)

    results = run_ranks(lambda: fit(Fsdp(), Twice(), batch_size=8, microbatch_size=2))

    assert_near(results[0][0], expected)


@pytest.mark.nightly
def test_batch_norm_over_all_ranks_is_that_of_one_process(fit):
    """The core converts them before anybody shards."""
    task = {"model": lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))}
    expected, _ = fit(batch_size=16, task=task)

    actual, _ = sharded(fit, task=task, sync_batch_norm=True)

    assert_near(actual, expected, 2e-6)


@pytest.mark.nightly
def test_bf16_is_near(fit):
    """What is sent has fewer bits; what is kept, and exported, has all of them."""
    expected, _ = fit(batch_size=16)
    options = {"param_dtype": "bf16", "reduce_dtype": "bf16"}

    actual, _ = sharded(fit, options=options, precision="bf16")

    assert {one.dtype for one in actual.values()} == {torch.float32}
    assert_near(actual, expected, 3e-2)
    with pytest.raises(AssertionError):
        assert_near(actual, expected)


class Spoils:
    """Puts an infinity into the loss of rank 1, or into its shard of a gradient."""

    name = "spoils"

    def __init__(self, what, at):
        self.what, self.at, self.kept = what, at, []

    def _is_due(self, state, what):
        return (self.what, 1, self.at) == (what, state.rank, state.clock.batch)

    @hookimpl(wrapper=True)
    def loss(self, state):
        loss = yield
        return loss * float("inf") if self._is_due(state, "loss") else loss

    @hookimpl
    def after_backward(self, state):
        if self._is_due(state, "gradient"):
            next(state.model.parameters()).grad.to_local().fill_(float("inf"))

    @hookimpl
    def batch_end(self, state):
        weights = [one.full_tensor().flatten() for one in state.model.parameters()]
        self.kept.append(torch.cat(weights).detach())


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_fp16_skips_a_step_on_all_ranks(tmp_path, what):
    """An overflow on one of them, be it in its own shard alone, is one on all."""

    def run():
        plugin, spoils = Fsdp(), Spoils(what, 4)
        folder = tmp_path
        settings = {"precision": "fp16", "on_bad_loss": "ignore"}
        with trainer_of(folder, plugin, spoils, **settings) as trainer:
            trainer.fit()
        return spoils.kept

    kept, same = run_ranks(run)

    assert [torch.equal(*pair) for pair in itertools.pairwise(kept)].index(True) == 3
    assert all(map(torch.equal, kept, same))
    assert all(one.isfinite().all() for one in kept)


@pytest.mark.nightly
def test_a_loss_that_is_no_number_on_one_rank_ends_the_run(fit):
    """Nobody waits for a rank that looks for the cause in its shards."""
    with pytest.raises(
        RankError, match="NonFiniteError: rank 1: the loss is inf at epoch 2, batch 10"
    ):
        run_ranks(lambda: fit(Fsdp(), Spoils("loss", 9), batch_size=4), timeout_s=60)


@pytest.mark.nightly
def test_fp16_is_near(fit):
    """Gradients are unscaled before the norm of all shards is taken."""
    expected, _ = fit(batch_size=16, clip_norm=0.05)

    actual, _ = sharded(fit, precision="fp16", clip_norm=0.05)

    assert_near(actual, expected, 1e-3)


def test_weights_in_another_layout_are_sharded(tmp_path):
    """Reduced precision keeps convolutions in channels_last, which can't be sharded."""

    def run(*plugins):
        layers = (nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 8, 3, padding=1), nn.Flatten())
        task = {"model": lambda: nn.Sequential(*layers, nn.Linear(8, 3))}
        folder = tmp_path / str(len(plugins))
        with trainer_of(folder, *plugins, task=task, precision="bf16") as trainer:
            trainer.fit()
            return trainer.notes

    (notes, _), expected = run_ranks(run, Fsdp()), run()

    assert [one for one in expected if "channels_last" in one]
    assert [one for one in notes if "channels_last" in one] == []


class Watches:
    """Keeps what is logged, counts host reads of a step, and what a rank holds."""

    name = "watches"

    def __init__(self):
        self.rows, self.found, self.held, self.types = [], [], [], set()
        self._reads = HostReads(lambda tensor, how: self.found.append(how))

    @hookimpl
    def before_train_batch(self, state):
        self._reads.__enter__()

    @hookimpl
    def batch_end(self, state):
        self._reads.__exit__(None, None, None)
        self.types |= {type(one) for one in state.model.parameters()}

    @hookimpl(trylast=True)
    def eval_after_all(self, state):
        self.types |= {type(one) for one in state.model.parameters()}

    @hookimpl
    def fit_end(self, state):
        tensors = [*state.model.parameters()]
        tensors += [
            value
            for optimizer in state.optimizers.values()
            for held in optimizer.state.values()
            for value in held.values()
            if value is not None and value.ndim
        ]
        self.held = [
            sum(one.to_local().numel() for one in tensors),
            sum(map(Tensor.numel, tensors)),
        ]

    @hookimpl
    def log(self, state, numbers):
        self.rows.append(numbers)


@pytest.fixture
def watched(fit):
    """Trains with clipping and an eval set; gives what was watched."""

    def watched(*plugins, **given):
        watches = Watches() if plugins else Logs()
        task = {"eval_dataloaders": {"test": DataLoader(TensorDataset(X[:7], Y[:7]), 2)}}
        fit(*plugins, watches, clip_norm=0.05, task=task, log_interval="1ba", **given)
        return vars(watches) | {"_reads": None}

    return watched


class Logs:
    """Keeps what is logged."""

    name = "watches"

    def __init__(self):
        self.rows = []

    @hookimpl
    def log(self, state, numbers):
        self.rows.append(numbers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_a_rank_holds_its_share_and_a_step_waits_for_nothing(watched, options):
    """Half of parameters and momentum, also after an evaluation; numbers are those of one rank."""
    expected = watched(batch_size=16)["rows"]

    for seen in run_ranks(lambda: watched(Fsdp(**options))):
        local, total = seen["held"]
        assert local == pytest.approx(total / 2, rel=0.1)
        assert seen["types"] == {DTensor}
        assert seen["found"] == []
        assert len(seen["rows"]) == len(expected)
        for row, wanted in zip(seen["rows"], expected, strict=True):
            assert row == pytest.approx(wanted, abs=1e-6)


class Stream(IterableDataset):
    """Batches whose number nobody knows beforehand."""

    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return iter([(X[:4], Y[:4])] * self.num_batches)


class Seen(SumMetric):
    """How many samples were evaluated."""

    def update(self, outputs, targets):
        super().update(torch.ones(len(targets)))


@pytest.mark.nightly
def test_ranks_evaluate_and_predict_for_different_numbers_of_batches(tmp_path):
    """Each pass takes all ranks: who has run out passes for nothing, and counts nothing."""

    def run():
        rank = int(os.environ["RANK"])
        loaders = {
            "stream": DataLoader(Stream(1 + 3 * rank), batch_size=None),
            "sized": DataLoader(TensorDataset(X[:7], Y[:7]), 2),
            "uneven": DataLoader(TensorDataset(X[:7], Y[:7]), 1),
        }
        task = {"eval_dataloaders": loaders, "metrics": {"seen": Seen()}}
        with trainer_of(tmp_path, Fsdp(), task=task, max_duration="1ba") as trainer:
            trainer.sanity_eval(2)
            metrics = trainer.fit().metrics
            outputs = trainer.predict((X[:4], Y[:4]) for _ in range(2 - rank))
            return [metrics[name]["seen"] for name in loaders], outputs

    (seen, outputs), (same, fewer) = run_ranks(run, timeout_s=60)

    assert seen == same == [4 * (1 + 4), 7, 7]
    assert (len(outputs), len(fewer)) == (2, 1)
    torch.testing.assert_close(fewer[0], outputs[0])


@pytest.mark.nightly
def test_an_evaluation_asks_for_its_length_alone(tmp_path):
    """A collective a data set, not one a batch, where the lengths are known."""

    def run(num_batches):
        asked = []
        loader = DataLoader(TensorDataset(X[: 4 * num_batches], Y[: 4 * num_batches]), 2)
        with trainer_of(tmp_path, Fsdp(), task={"eval_dataloaders": loader}) as trainer:
            made = dist.all_reduce
            dist.all_reduce = lambda *args, **given: [asked.append(1), made(*args, **given)][1]
            trainer.eval()
        return len(asked)

    assert run_ranks(run, 1) == run_ranks(run, 12)


class Longer(SequentialSampler):
    """Yields more than its length."""

    def __len__(self):
        return 2


def test_an_eval_data_loader_of_another_length_than_it_says_is_named(tmp_path):
    def run():
        data = TensorDataset(X[:8], Y[:8])
        sampler = Longer(data)
        sampler.num_replicas = 2  # splits itself
        task = {"eval_dataloaders": DataLoader(data, 2, sampler=sampler)}
        with trainer_of(tmp_path, Fsdp(), task=task) as trainer:
            trainer.eval()

    with pytest.raises(RankError, match="an eval data loader of 1 batches gave 1 and more"):
        run_ranks(run)


@pytest.mark.nightly
def test_weights_and_optimizer_states_are_those_of_one_process(tmp_path):
    """Names, shapes and layout: what one strategy saved, another can load."""

    def run(*plugins, **given):
        folder = tmp_path / str(len(plugins))
        with trainer_of(folder, *plugins, optimizer="adamw", **given) as trainer:
            trainer.fit()
            state = trainer.state
            if plugins:
                (states,) = (sliced(one.state_dict()) for one in state.optimizers.values())
                found = {idx: whole(state, one) for idx, one in states["state"].items()}
                return whole(state, sliced(state.model.state_dict())), {**states, "state": found}
            optimizers = {name: one.state_dict() for name, one in state.optimizers.items()}
            return state.model.state_dict(), optimizers

    weights, states = run(batch_size=16)
    (actual, found), (nothing, _) = run_ranks(lambda: run(Fsdp()))

    assert_near(actual, dict(weights))
    (expected,) = states.values()
    assert found["param_groups"] == expected["param_groups"]
    for idx, state in expected["state"].items():
        assert_near(found["state"][idx], state)
    assert nothing == {}


@pytest.mark.nightly
def test_a_run_goes_on_from_restored_shards(tmp_path, fit):
    """Weights and moments of one process, loaded by two ranks, end where it ends."""
    expected, _ = fit(optimizer="adamw", batch_size=16, max_duration="4ep")
    with trainer_of(tmp_path / "one", optimizer="adamw", batch_size=16, max_duration="2ep") as one:
        one.fit()
        weights = one.state.model.state_dict()
        states = {name: given.state_dict() for name, given in one.state.optimizers.items()}

    def run():
        plugin, folder = Fsdp(), tmp_path / "two"
        with trainer_of(folder, plugin, optimizer="adamw", max_duration="2ep") as trainer:
            restore_model(trainer.state, trainer._hooks, weights, None)
            for name, optimizer in trainer.state.optimizers.items():
                optimizer.load_state_dict(read_states(states[name], optimizer))
            trainer.fit()
            return whole(trainer.state, sliced(trainer.state.model.state_dict()))

    actual, _ = run_ranks(run)

    assert_near(actual, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("head.bias"), "head.bias"),
        (lambda weights: weights.update(more=torch.zeros(1)), "more"),
        (lambda weights: weights.update({"head.bias": torch.zeros(4)}), "size mismatch"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    """As they are in one process; not strict, missing and unexpected names pass."""
    weights = Net().state_dict()
    change(weights)

    def run():
        with trainer_of(tmp_path / os.environ["RANK"], Fsdp()) as trainer:
            save_file(dict(weights), tmp_path / f"{trainer.state.rank}.safetensors")
            if message != "size mismatch":
                path = tmp_path / f"{trainer.state.rank}.safetensors"
                with pytest.warns(UserWarning, match=message):
                    trainer.load_weights(path, strict=False)
            trainer.load_weights(tmp_path / f"{trainer.state.rank}.safetensors")

    with pytest.raises(RankError, match=rf"TaskError: the weights[\s\S]*{message}"):
        run_ranks(run)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"param_dtype": "bf16"}, {}, "param_dtype is bf16, but the run's precision is fp32"),
        ({}, {"microbatch_size": "auto"}, "microbatch_size='auto' isn't possible with fsdp"),
        ({"layers": ["Liner"]}, {}, "no submodule of class 'Liner'; the closest is 'Linear'"),
    ],
)
def test_what_can_not_be_is_refused_when_the_trainer_is_built(tmp_path, options, settings, message):
    """With the line to write instead."""
    with pytest.raises(RankError, match=message):
        run_ranks(lambda: trainer_of(tmp_path, Fsdp(**options), **settings))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Rprop"])
def test_an_optimizer_that_can_not_step_shards_is_refused(tmp_path, name):
    """Instead of torch's word about placements, at the first step."""
    task = {"optimizer": lambda model: getattr(torch.optim, name)(model.parameters())}

    with pytest.raises(RankError, match=f"is {name}, which can't step the shards of fsdp"):
        run_ranks(lambda: trainer_of(tmp_path, Fsdp(), task=task))


def test_one_process_has_nothing_to_shard(tmp_path):
    """Who asks for it is told; one that is merely installed is off."""
    with pytest.raises(PluginError, match="one process alone has nothing to shard"):
        trainer_of(tmp_path, Fsdp())


def test_different_models_are_found_and_different_weights_are_rank_zeros(tmp_path):
    """A model that is handed over was drawn before eventloop seeded."""

    def run(width):
        rank = int(os.environ["RANK"])
        torch.manual_seed(rank)
        task = {"model": nn.Linear(3, 3 + width * rank)}
        plugin = Fsdp()
        with trainer_of(tmp_path / f"{rank}{width}", plugin, task=task) as trainer:
            return whole(trainer.state, sliced(trainer.state.model.state_dict()))

    torch.manual_seed(0)
    expected = nn.Linear(3, 3).state_dict()

    assert_near(run_ranks(run, 0)[0], dict(expected), 0)
    with pytest.raises(RankError, match="their models differ"):
        run_ranks(run, 1)


class LeavesTraces(Net):
    """Counts its passes in training, and draws in each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, inputs):
        self.num_passes += self.training
        torch.rand(1)
        return super().forward(inputs)


def in_parts(first, last, rank=0, world_size=1):
    """Makes a batch of these samples, rank 1's in parts twice as large."""
    return collated(default_collate, microbatch_size=1 + rank)(
        [(X[idx], Y[idx]) for idx in range(first + rank, last, world_size)]
    )


def of_parts(folder, *plugins):
    """Trains and evaluates batches of parts; returns weights, eval metrics and what passes left."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    batches = [in_parts(at, at + 6, rank, world_size) for at in range(0, 48, 6)]
    task = {
        "model": LeavesTraces,
        "train_dataloader": DataLoader(Batches(batches), batch_size=None),
    }
    # A list of batches is shared out by batches: rank 0 makes five passes more.
    task["eval_dataloaders"] = {"test": [in_parts(0, 7), in_parts(7, 9)]}
    with trainer_of(folder / f"{world_size}{rank}", *plugins, task=task) as trainer:
        trainer.fit()
        path = trainer.export(folder / f"{rank}.safetensors")
        weights = load_file(path) if path.exists() else {}
        weights.pop("num_passes", None)
        traces = [trainer.state.model.num_passes.clone(), torch.get_rng_state()]
        return weights, trainer.state.eval_metrics["test"], traces


@pytest.mark.nightly
def test_ranks_may_have_other_numbers_of_microbatches(tmp_path):
    """Ranks with fewer compute a pass that counts for nothing, and leaves nothing behind."""
    expected, metrics, _ = of_parts(tmp_path)
    of_ddp = run_ranks(of_parts, tmp_path)

    of_fsdp = run_ranks(of_parts, tmp_path, Fsdp(), timeout_s=60)

    assert_near(of_fsdp[0][0], expected)
    for (_, ours, traces), (_, _, of_theirs) in zip(of_fsdp, of_ddp, strict=True):
        assert_near(ours, metrics)
        assert all(map(torch.equal, traces, of_theirs))


@pytest.mark.nightly
@pytest.mark.parametrize("rank_of_more", [0, 1])
def test_batches_of_other_sizes_make_other_numbers_of_microbatches(tmp_path, rank_of_more):
    """Whichever rank has more, none waits for the other for ever."""
    parts = {rank_of_more: slice(0, 9), 1 - rank_of_more: slice(9, 12), None: slice(0, 12)}

    def run(*plugins):
        rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
        batches = Batches([(X[parts[rank]], Y[parts[rank]])])
        task = {"train_dataloader": DataLoader(batches, batch_size=None)}
        with trainer_of(tmp_path / f"{rank}", *plugins, task=task, microbatch_size=3) as trainer:
            trainer.fit()
            path = trainer.export(tmp_path / f"{rank}.safetensors")
        return load_file(path) if path.exists() else {}

    expected = run()

    assert_near(run_ranks(run, Fsdp(), timeout_s=60)[0], expected)


class Updates:
    """Makes an update with passes of its own."""

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: next(state.model.parameters()).to_local().sum())


def test_updates_of_other_numbers_of_microbatches_are_told(tmp_path):
    """Their passes are the plugin's own: rather than waiting for each other for ever."""

    def run():
        rank = int(os.environ["RANK"])
        batches = Batches([(X[: 4 + 4 * rank], Y[: 4 + 4 * rank])])
        task = {"train_dataloader": DataLoader(batches, batch_size=None)}
        with trainer_of(tmp_path, Fsdp(), Updates(), task=task, microbatch_size=4) as trainer:
            trainer.fit()

    expected = (
        "rank 0 has 1 microbatches and rank 1 has 2[\\s\\S]*give all ranks batches of one size"
    )
    with pytest.raises(RankError, match=expected):
        run_ranks(run, timeout_s=60)


class Batches(IterableDataset):
    """These batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_uneven_numbers_of_batches_end_together(tmp_path):
    """A rank that has run out waits with a batch that counts for nothing, as under DDP."""

    def run(*plugins):
        rank = int(os.environ["RANK"])
        task = {"train_dataloader": DataLoader(Stream(2 + rank), batch_size=None)}
        folder = tmp_path / str(len(plugins))
        with trainer_of(folder, *plugins, task=task, max_duration="2ep") as trainer:
            trainer.fit()
            path = trainer.export(folder / "model.safetensors")
            return (load_file(path) if rank == 0 else {}), trainer.state.clock.moment().sample

    (expected, samples), _ = run_ranks(run, timeout_s=60)
    for weights, seen in run_ranks(run, Fsdp(), timeout_s=60):
        assert seen == samples
        assert_near(weights, expected if weights else {})


class Branches(nn.Module):
    """Of which rank 1 leaves a part unused."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        outputs = self.left(inputs)
        return outputs if torch.distributed.get_rank() else outputs + self.right(inputs)


@pytest.mark.nightly
def test_a_parameter_unused_on_one_rank_counts_as_under_ddp(fit):
    """Where `find_unused_parameters` asks for it."""
    given = {"task": {"model": Branches}, "find_unused_parameters": True}
    expected, _ = run_ranks(lambda: fit(**given))[0]

    actual, _ = sharded(fit, **given)

    assert_near(actual, expected)


class Tied(nn.Module):
    """One weight in two places, of which one is a layer that repeats."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.blocks[1].weight = self.first.weight

    def forward(self, inputs):
        return self.blocks(self.first(inputs))


def test_tied_weights_stay_tied(fit):
    """A layer that shares a weight with others isn't sharded by itself."""
    task = {"model": Tied}
    expected, _ = fit(batch_size=16, task=task)

    actual, _ = sharded(fit, task=task)

    assert_near(actual, expected)
    assert torch.equal(actual["first.weight"], actual["blocks.1.weight"])


class Compiled(Net):
    """Whose layers are compiled, each by itself."""

    def __init__(self):
        super().__init__()
        for one in self.layers:
            one.compile(backend="aot_eager")


@pytest.mark.nightly
def test_compiled_layers_are_sharded_like_others(fit):
    """Gathering stays outside of what is compiled."""
    expected, _ = fit(batch_size=16)

    actual, _ = sharded(fit, task={"model": Compiled})

    assert_near(actual, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("best", ["max valid/loss", None])
def test_a_test_set_is_evaluated_with_the_best_weights(tmp_path, best):
    """They are cut into shards for it, and the run ends with its last ones; the loss falls."""
    loader = DataLoader(TensorDataset(X[:20], Y[:20]), 4)

    def train(name, batch_size, *plugins):
        task = {"eval_dataloaders": {"valid": loader}, "test_dataloaders": loader}
        saving = {"run_dir": tmp_path / name, "checkpoint_best": best}
        given = {"batch_size": batch_size, "optimizer": "adamw", "task": task} | saving
        with trainer_of(tmp_path, *plugins, **given) as trainer:
            result = trainer.fit()
            path = trainer.export(tmp_path / f"{name}.safetensors")
        return result.metrics, result.history, load_file(path) if path.exists() else {}

    metrics, history, weights = train("one", 8)
    (found, rows, theirs), (others, *_) = run_ranks(lambda: train("two", 4, Fsdp()))

    assert_near(theirs, weights)
    assert found["test"]["loss"] == others["test"]["loss"]
    assert found["test"]["loss"].item() == pytest.approx(metrics["test"]["loss"].item(), rel=1e-5)
    assert rows[-1]["test/loss"] == pytest.approx(
        history[0 if best else -1]["valid/loss"], rel=1e-5
    )
    assert history[0]["valid/loss"] > 1.01 * history[-1]["valid/loss"]


class Calls:
    """A callback that calls the model by itself, as often on each rank."""

    name = "calls"

    def __init__(self):
        self.seen = []

    @hookimpl
    def eval_end(self, state):
        hidden = state.model(X[:2].to(state.device))
        for _ in range(2):  # each word from the one before
            hidden = state.model(hidden)
        self.seen.append(hidden.tolist())


@pytest.mark.nightly
def test_a_callback_calls_a_sharded_model_while_it_is_evaluated(tmp_path):
    """Layers are gathered by the call itself; ranks have the results of one process."""
    task = {"eval_dataloaders": {"test": DataLoader(TensorDataset(X[:20], Y[:20]), 4)}}

    def seen(folder, *plugins, **given):
        calls = Calls()
        with trainer_of(folder, *plugins, task=task, callbacks=[calls], **given) as trainer:
            trainer.fit()
            trainer.eval()
        return calls.seen

    first, second = run_ranks(lambda: seen(tmp_path / "two", Fsdp()))
    alone = seen(tmp_path / "one", batch_size=16)

    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=0, atol=1e-5)
