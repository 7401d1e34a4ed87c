"""Runs of many kinds, each killed several times: they end with the bytes of one that wasn't."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from eventloop import hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.distributed import join_processes
from eventloop.files import disk
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

# Of 5 batches an epoch and 3 epochs: in mid-epoch, at its last batch, at the first of the next.
KILLS = (2, 5, 6, 12)
# Of 3 batches an epoch, likewise.
KILLS_ON_RANKS = (2, 3, 4, 8)


class Log:
    """A callback that keeps the log, the last word on each number; has checkpoints saved."""

    name = "log"

    def __init__(self):
        self.numbers = {}

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch in KILLS + KILLS_ON_RANKS:
            state.request_checkpoint()

    @hookimpl
    def log(self, state, numbers, at):
        self.numbers |= {(at.batch, name): value for name, value in numbers.items()}


def data():
    return TensorDataset(*(torch.cat(parts) for parts in zip(*tiny_batches(5), strict=True)))


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def adam(model, **given):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **given})


class Overflows:
    """Has gradients overflow now and then, so that the scale changes in the course of the run."""

    name = "overflows"

    @hookimpl
    def after_backward(self, state):
        if state.clock.batch % 4 == 2:
            next(state.model.parameters()).grad.view(-1)[0] = torch.inf


class Plateau:
    """Lowers the rate when the loss stands still: a scheduler that needs a metric."""

    name = "plateau"

    @hookimpl
    def training_start(self, state):
        self.scheduler(state)

    @hookimpl
    def eval_after_all(self, state):
        self.scheduler(state).step(state.eval_metrics["test"]["accuracy"])

    def scheduler(self, state):
        if not hasattr(self, "made"):
            (optimizer,) = state.optimizers.values()
            self.made = ReduceLROnPlateau(optimizer, patience=0)
            if hasattr(self, "kept"):
                self.made.load_state_dict(self.kept)
        return self.made

    def state_dict(self):
        state = dict(self.made.state_dict()) if hasattr(self, "made") else {}
        return {name: one for name, one in state.items() if name != "best" or one is not None}

    def load_state_dict(self, state, version):
        self.kept = dict(state)


class Both(nn.Module):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.discriminator(inputs).expand(-1, 3)


class Adversarial:
    """Two updates a batch, with noise of its own."""

    name = "adversarial"

    @hookimpl
    def train_batch(self, state):
        model = state.model
        noise = torch.randn(len(state.inputs), 2, generator=state.generator("noise"))

        def loss_d(state):
            told = torch.cat([model(state.inputs), model(model.generator(noise).detach())])
            return binary_cross_entropy_with_logits(told, torch.ones_like(told))

        def loss_g(state):
            told = model(model.generator(noise))
            return binary_cross_entropy_with_logits(told, torch.ones_like(told))

        state.update(loss_d, ["D"])
        return state.update(loss_g, ["G"])


class MatricesAndRest(torch.optim.Optimizer):
    """One optimizer made of two, whose states are kept side by side, as many a composite has it."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), {"lr": lr})
        params = list(model.parameters())
        self.matrices = torch.optim.SGD([one for one in params if one.ndim > 1], lr, 0.9)
        self.rest = torch.optim.AdamW([one for one in params if one.ndim < 2], 0.01)

    @torch.no_grad()
    def step(self, closure=None):
        self.matrices.step()
        self.rest.step()

    def state_dict(self):
        return {"matrices": self.matrices.state_dict(), "rest": self.rest.state_dict()}

    def load_state_dict(self, state_dict):
        self.matrices.load_state_dict(state_dict["matrices"])
        self.rest.load_state_dict(state_dict["rest"])


def two_optimizers(model):
    return {"D": adam(model.discriminator), "G": adam(model.generator, lr=0.02)}


class Counting(IterableDataset):
    """Samples in a row, drawn from the global generator."""

    def __iter__(self):
        for _ in range(20):
            inputs = torch.randn(3)
            yield inputs, inputs.argmax()


class CountingWithState(IterableDataset):
    """The same with a position; in workers, whose draws aren't saved, it draws nothing."""

    def __init__(self):
        self.load_state_dict({"num": 0})

    def __iter__(self):
        start, self.start = self.start, 0
        is_worker = torch.utils.data.get_worker_info() is not None
        for self.num in range(start + 1, 21):
            inputs = torch.arange(3.0) % self.num if is_worker else torch.randn(3)
            yield inputs, inputs.argmax()

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = self.start = state["num"]


class Wraps:
    """A loader whose iterator is a generator: its workers' seed is drawn when the first batch is wanted."""

    def __init__(self, num_workers=0):
        self.loader = StatefulDataLoader(CountingWithState(), 4, num_workers=num_workers)

    def __iter__(self):
        yield from self.loader

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class OutOfMemory(nn.Module):
    """Has memory for two samples only, at first."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, inputs):
        if self.training and len(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.layers(inputs)


def metrics():
    return {
        "auroc": MulticlassAUROC(3),  # keeps all that it has seen, as a list
        "accuracy": MulticlassAccuracy(3, average="micro"),
    }


def task(**given):
    values = {"model": network, "train_dataloader": tiny_batches(5), "optimizer": adam}
    return tiny_task(**(values | given))


def kind(plugins=(), settings=None, **given):
    """Returns what makes a trainer of one kind, anew each time."""
    return lambda: (task(**given), [one() for one in plugins], settings or {})


KINDS = {
    "plain": kind(),
    "lbfgs": kind(
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)
    ),
    "adafactor": kind(optimizer=lambda model: torch.optim.Adafactor(model.parameters())),
    "one made of two": kind(optimizer=lambda model: MatricesAndRest(model, lr=0.1)),
    "sgd with momentum": kind(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ),
    "amsgrad, a tensor for a rate": kind(
        optimizer=lambda model: adam(model, amsgrad=True, lr=torch.tensor(0.01), foreach=False)
    ),
    "groups": kind(
        optimizer=lambda model: torch.optim.RMSprop(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}],
            centered=True,
        )
    ),
    "one cycle": kind(scheduler=lambda one: OneCycleLR(one, max_lr=0.1, total_steps=15)),
    "once an epoch": kind(
        scheduler=lambda one: StepLR(one, step_size=1, gamma=0.5), scheduler_interval="ep"
    ),
    "plateau": kind([Plateau]),
    "fp16": kind([Overflows], {"precision": "fp16"}, scheduler=lambda one: StepLR(one, 1, 0.9)),
    "bf16, clipped": kind(settings={"precision": "bf16", "clip_norm": 0.1}),
    "two updates a batch": kind([Adversarial], model=Both, optimizer=two_optimizers),
    "train metrics": kind(
        settings={"log_interval": "4ba"},
        train_metrics=metrics(),
    ),
    "auto": kind(
        settings={"microbatch_size": "auto", "eval_interval": None},
        model=OutOfMemory,
        eval_dataloaders=None,
    ),
    "shuffled": kind(train_dataloader=lambda: DataLoader(data(), 4, shuffle=True)),
    "iterable": kind(train_dataloader=lambda: DataLoader(Counting(), 4)),
    "stateful": kind(train_dataloader=lambda: StatefulDataLoader(data(), 4, shuffle=True)),
    "stateful stream": kind(train_dataloader=lambda: StatefulDataLoader(CountingWithState(), 4)),
    "wrapped stream": kind(train_dataloader=Wraps),
    "iterable, workers": kind(train_dataloader=lambda: DataLoader(Counting(), 4, num_workers=2)),
    "stateful stream, workers": kind(
        train_dataloader=lambda: StatefulDataLoader(CountingWithState(), 4, num_workers=2)
    ),
    "wrapped stream, workers": kind(train_dataloader=lambda: Wraps(num_workers=2)),
    "tied weights": kind(model=lambda: nn.Sequential(*2 * [nn.Linear(3, 3)])),
    "deterministic": kind(settings={"deterministic": True}),
}


SETTINGS = {
    "max_duration": "3ep",
    "eval_interval": "4ba",
    "checkpoint_interval": "100ba",
    "checkpoint_keep": None,
    "gc_interval": None,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Doesn't wait for the disk; nor for a first use of torch's compiler in each fork."""
    import torch._dynamo  # noqa: F401

    monkeypatch.setattr(disk, "sync", lambda *_: None)
    monkeypatch.setattr(disk, "sync_folder", lambda *_: None)


def run(folder, make, log):
    """Starts a run or goes on with it, to its end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*batches were read again")
        warnings.filterwarnings("ignore", ".*may get other batches than before")
        warnings.filterwarnings("ignore", ".*out of memory")
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        given, plugins, settings = make()
        settings = SETTINGS | settings
        with isolated_trainer(
            folder, given, algorithms=plugins, callbacks=[log], **settings
        ) as trainer:
            trainer.fit()


def result(folder):
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*"))).parts


def kill_after(folder, batch):
    """Leaves the run as a kill would have after a batch: later checkpoints were never written."""
    processes = join_processes()
    processes.all_gather(None)
    if processes.rank:
        return
    for path in (folder / "run" / "checkpoints").glob("ba*"):
        if int(path.name[2:]) > batch:
            shutil.rmtree(path)


def killed_often(folder, make, log, kills=KILLS):
    run(folder, make, log)
    for batch in kills:
        kill_after(folder, batch)
        run(folder, make, log)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_any_kind_ends_the_same(tmp_path, name):
    """Whatever it is made of knows where it was."""
    whole, killed = Log(), Log()
    run(tmp_path / "whole", KINDS[name], whole)

    killed_often(tmp_path / "killed", KINDS[name], killed)

    found = differences(result(tmp_path / "whole"), result(tmp_path / "killed"))
    assert [f"{one.path}: {one.first} / {one.second}" for one in found] == []
    assert killed.numbers == whole.numbers


ON_RANKS = ["plain", "lbfgs", "fp16", "two updates a batch", "train metrics", "auto"]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [*ON_RANKS, "shuffled", "stateful"])
def test_a_run_of_any_kind_ends_the_same_on_two_ranks(tmp_path, name):
    """Each rank knows what it alone knows."""
    require_same_on_ranks(tmp_path, KINDS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["plain", "bf16, clipped"])
def test_shards_go_on_as_they_were(tmp_path, name):
    """A checkpoint holds weights and moments whole, and each rank takes its shards again."""

    def make():
        given, plugins, settings = KINDS[name]()
        return given, [*plugins, Fsdp()], settings

    require_same_on_ranks(tmp_path, make)


def require_same_on_ranks(folder, make):
    def train():
        whole, killed = Log(), Log()
        run(folder / "whole", make, whole)
        killed_often(folder / "killed", make, killed, KILLS_ON_RANKS)
        return whole.numbers, killed.numbers

    ((whole, killed), _) = run_ranks(train)

    found = differences(result(folder / "whole"), result(folder / "killed"))
    assert [f"{one.path}: {one.first} / {one.second}" for one in found] == []
    assert killed == whole
