"""Where shards lie, and what is compiled of them: the weights are those of one process all the same."""

from __future__ import annotations

import pytest
import setuptools  # noqa: F401  after distutils, which inductor imports, it can't be imported any more
import torch
from safetensors.torch import load_file
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop.checkpoint.store import Store
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


class Layer(nn.Module):
    """One of those that repeat; torch.compile leaves a lone nn.Linear as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


class Net(nn.Module):
    """Layers that repeat, between two that don't."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Watches:
    """Keeps where parameters and states lie at the end."""

    name = "watches"

    def __init__(self):
        self.held = 0
        self.notes = ()

    @hookimpl
    def fit_end(self, state):
        tensors = list(state.model.parameters())
        self.held = sum(getattr(one, "_local_tensor", one).numel() for one in tensors)
        self.num = sum(one.numel() for one in tensors)


def train(folder, options=None, until=None, batch_size=24, plugins=(), model=Net, **settings):
    """Trains three epochs with clipping; returns the weights, and what was watched."""
    watches = Watches()
    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(TensorDataset(X, Y), batch_size),
        eval_dataloaders=lambda: DataLoader(TensorDataset(X[:7], Y[:7]), 2),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    plugins = [watches, *plugins] if options is None else [Fsdp(**options), watches, *plugins]
    given = {"max_duration": "3ep", "clip_norm": 0.05, "checkpoint_interval": "1ba"} | settings
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        watches.notes = trainer.notes
        trainer.fit(until=until)
        path = trainer.export(folder / "model.safetensors")
    return load_file(path) if path.exists() else {}, vars(watches)


def assert_near(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "shared", "world_size"),
    [({"replicate": 2}, 2, 4), ({"replicate": 2}, 1, 2), ({"offload": True}, 2, 2),
     ({"replicate": 2, "offload": True}, 2, 4)],
)  # fmt: skip
def test_shards_in_other_places_end_with_the_weights_of_one_process(
    tmp_path, options, shared, world_size
):
    """Copies average their gradients; a rank holds a share of a copy, on the host or not."""
    expected, _ = train(tmp_path / "one")

    ranks = run_ranks(
        train, tmp_path / "ranks", options, batch_size=24 // world_size, world_size=world_size
    )

    assert_near(ranks[0][0], expected)
    for _, seen in ranks:
        assert seen["held"] == pytest.approx(seen["num"] / shared, rel=0.15)


@pytest.mark.nightly
def test_copies_go_on_with_other_ranks(tmp_path):
    """Checkpoints hold whole tensors: copies over two ranks each go on in one rank each."""
    expected, _ = train(tmp_path / "one")
    run_ranks(train, tmp_path, {"replicate": 2}, "3ba", batch_size=6, world_size=4)

    (actual, _), _ = run_ranks(train, tmp_path, {"replicate": 2}, batch_size=12)

    assert_near(actual, expected)


@pytest.mark.parametrize("replicate", [0, 3])
def test_copies_that_the_ranks_can_not_hold_are_refused(tmp_path, replicate):
    """With the number that they would have to divide."""
    with pytest.raises(RankError, match=rf"replicate={replicate}: 2 ranks[\s\S]*that divides 2"):
        run_ranks(train, tmp_path, {"replicate": replicate})


class CountsSums:
    """Counts what travels between the ranks to clip, at each step."""

    name = "counts-sums"

    def __init__(self):
        self.found = []

    @hookimpl(wrapper=True)
    def clip_gradients(self, state):
        with CommDebugMode() as counting:
            numbers = yield
        self.found.append(counting.get_total_counts())
        return numbers


def num_sums(folder, options):
    counts = CountsSums()
    train(folder, options, "2ba", batch_size=6, plugins=(counts,))
    return counts.found


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"replicate": 2}])
def test_a_norm_over_shards_is_one_sum_however_many_parameters(tmp_path, options):
    """A sum for each of them would have each wait for the one before."""
    for found in run_ranks(num_sums, tmp_path, options, world_size=4):
        assert found == [1, 1]


GRAPHS = []


def counted(graph, inputs):
    """A backend of torch.compile that counts what it is given, and compiles nothing."""
    GRAPHS.append(graph)
    return graph.forward


def compiled(folder, options=None, backend=counted, layers=False, **given):
    GRAPHS.clear()
    weights, seen = train(folder, options, compile={"backend": backend, "layers": layers}, **given)
    return weights, seen["notes"], len(GRAPHS)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by torch's compiler
def test_each_sharded_layer_is_compiled_by_itself(tmp_path):
    """What gathers it stays outside; an evaluation runs it, too."""
    expected, _, _ = compiled(tmp_path / "one")

    (actual, notes, num), (_, _, same) = run_ranks(
        compiled, tmp_path / "ranks", {}, batch_size=12, timeout_s=240
    )

    assert_near(actual, expected)
    assert notes[0].startswith("compile: 2 sharded layers, each compiled separately, backend=")
    assert 2 <= max(num, same) <= 3  # training and evaluation: layers that are alike share them


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("options", [None, {}])
def test_two_ranks_and_one_compile_the_same_layers(tmp_path, options):
    """With DDP and FSDP, from the core's setting; and end alike."""
    expected, notes, num = compiled(tmp_path / "one", layers=True)

    (actual, of_ranks, of_rank), _ = run_ranks(
        compiled, tmp_path / "ranks", options, layers=True, batch_size=12, timeout_s=240
    )

    assert_near(actual, expected)
    assert 2 <= max(num, of_rank) <= 3
    for one in (notes, of_ranks):
        assert any(note.startswith("compile: 2 ") and "separately" in note for note in one)


@pytest.mark.nightly
@inductor_config.patch(compile_threads=1)  # ranks are forks, in which its pool of processes hangs
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, in torch 2.13
@pytest.mark.parametrize(
    ("options", "layers"), [(None, False), (None, True), ({}, False), ({}, True)]
)
def test_two_ranks_and_one_end_alike_where_kernels_are_compiled(tmp_path, options, layers):
    """With DDP and FSDP; kernels of other shapes are fused in other ways, which rounds differently."""
    expected, _, _ = compiled(tmp_path / "one", backend="inductor", layers=layers)

    given = {"backend": "inductor", "layers": layers, "batch_size": 12, "timeout_s": 500}
    (actual, _, _), _ = run_ranks(compiled, tmp_path / "ranks", options, **given)

    assert_near(actual, expected, 1e-5)


class Small(nn.Module):
    """Parameters of fewer rows than ranks: of two ranks that hold a copy, one holds nothing of some."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.score = nn.Linear(3, 1)
        self.register_buffer("shift", torch.full((1,), 0.5))

    def forward(self, inputs):
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * self.scale
        return hidden + self.score(hidden) * inputs + self.shift


@pytest.mark.nightly
@pytest.mark.parametrize("meta", [False, True])
def test_copies_in_which_a_rank_holds_nothing_are_saved_and_go_on(tmp_path, meta):
    """Of what is empty, too, the checkpoint says where it belongs: the same ranks read it, and others."""
    options, four = {"replicate": 2, "meta": meta}, {"world_size": 4, "batch_size": 6}
    expected, _ = train(tmp_path / "one", model=Small)
    whole = run_ranks(train, tmp_path / "four", options, model=Small, **four)
    ends = [
        run_ranks(train, tmp_path, options, "3ba", model=Small, **four)[0][0],
        run_ranks(train, tmp_path, options, "4ba", model=Small, **four)[0][0],
    ]

    checkpoints = Store(tmp_path / "run" / "checkpoints").found(digests=True)
    ends.append(run_ranks(train, tmp_path, options, model=Small, batch_size=12)[0][0])

    assert [one.damage for one in checkpoints] == [""] * len(checkpoints)
    assert_near(whole[0][0], expected)
    assert_near(ends[-1], expected)
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in expected)


@pytest.mark.nightly
def test_weights_of_copies_in_which_a_rank_holds_nothing_are_loaded(tmp_path):
    """By one process, by copies, and by shards without copies, as `eval --weights` does."""
    options, four = {"replicate": 2}, {"world_size": 4}
    expected = run_ranks(train, tmp_path, options, model=Small, batch_size=6, **four)[0][0]
    (checkpoint, *_) = Store(tmp_path / "run" / "checkpoints").paths()

    def loaded(folder, options):
        plugins = [] if options is None else [Fsdp(**options)]
        task = Task(model=Small, eval_dataloaders=DataLoader(TensorDataset(X, Y), 6))
        with isolated_trainer(folder, task, algorithms=plugins) as trainer:
            trainer.load_weights(checkpoint)
            path = trainer.export(folder / "model.safetensors")
        return load_file(path) if path.exists() else {}

    for folder, given in (("copies", options), ("shards", {})):
        assert_near(run_ranks(loaded, tmp_path / folder, given, **four)[0], expected, 0)
    assert_near(loaded(tmp_path / "one", None), expected, 0)
