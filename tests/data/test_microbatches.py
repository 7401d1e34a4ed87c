"""A batch of parts with shapes of their own: trained on, counted, evaluated and resumed as they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from eventloop import Task, TaskError, Trainer, hookimpl
from eventloop.data import Microbatches, collated, zipped
from eventloop.data.batches import (
    describe,
    inputs_of,
    is_pair,
    map_tensors,
    num_samples,
    targets_of,
)
from eventloop.data.microbatches import microbatches_of
from eventloop_testing import run_ranks

pytestmark = pytest.mark.usefixtures("clean")

LENGTHS = (3, 9, 1, 4, 12, 2, 2, 7, 5, 1, 8, 3, 6)
GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = [(torch.randint(1, 20, (num,), generator=GENERATOR), num % 3) for num in LENGTHS]


def pad(samples):
    """Pads to the longest of these samples: ids of shape (N, T), and targets."""
    ids, targets = zip(*samples, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.tensor(targets)


class MeanOfWords(nn.Module):
    """Classifies by the mean of its words; what is padded doesn't count."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.words(ids).sum(1) / (ids != 0).sum(1, keepdim=True))


def loader(size=2, **given):
    values = {"batch_size": 6, "shuffle": True, "collate_fn": collated(pad, microbatch_size=size)}
    return DataLoader(SAMPLES, **values | given)


def make_task(**given):
    values = {
        "model": MeanOfWords,
        "loss": cross_entropy,
        "train_dataloader": loader,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        "num_tokens": lambda inputs: int((inputs != 0).sum()),
    }
    return Task(**values | given)


def weights_of(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def trained(task=None, *, until=None, **given):
    """Trains two epochs; returns the weights, and samples and tokens on the clock."""
    settings = {"device": "cpu", "autoload": False, "max_duration": "2ep"} | given
    with Trainer(task or make_task(), **settings) as trainer:
        trainer.fit(until=until)
        clock = trainer.state.clock
        return weights_of(trainer.state.model), (clock.sample, clock.token)


class Keeps:
    """Keeps the model of the start, and each batch."""

    def __init__(self):
        self.batches = []

    @hookimpl
    def fit_start(self, state):
        self.model = copy.deepcopy(state.model)

    @hookimpl
    def batch_start(self, state):
        self.batches.append(state.batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_trains_as_a_loop_that_pads_each_microbatch(num_workers):
    """One step a batch, each part weighted by its samples."""
    keeps = Keeps()
    task = make_task(train_dataloader=lambda: loader(num_workers=num_workers), callbacks=[keeps])

    weights, counted = trained(task)

    model = keeps.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in keeps.batches:
        assert all((inputs != 0).sum(1).max() == inputs.shape[1] for inputs, _ in batch)
        size = sum(len(targets) for _, targets in batch)
        for inputs, targets in batch:
            (cross_entropy(model(inputs), targets) * len(targets) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights, weights_of(model), rtol=0, atol=1e-6)
    assert [len(batch) for batch in keeps.batches] == [3, 3, 1] * 2
    assert counted == (2 * len(LENGTHS), 2 * sum(LENGTHS))


def test_the_task_counts_each_part():
    """As its functions count any batch."""
    task = make_task(num_samples=lambda inputs: 10 * len(inputs), num_tokens=None)

    _, counted = trained(task)

    assert counted == (2 * 10 * len(LENGTHS), 0)


@pytest.mark.parametrize("size", [1, "auto"])
def test_a_microbatch_size_is_refused(size):
    """It would change nothing, and who sets it expects that it does."""
    shown = (
        rf"microbatch_size is {size}, but the batch is Microbatches of 3 \(tuple, tuple, tuple\)"
    )

    with pytest.raises(TaskError, match=shown):
        trained(microbatch_size=size)


def test_an_evaluation_takes_the_parts_one_after_the_other():
    """Each is a batch there, so that means are over samples; a prediction likewise."""
    task = make_task(eval_dataloaders=lambda: loader(shuffle=False))
    with Trainer(task, device="cpu", autoload=False, max_duration="1ep") as trainer:
        results = trainer.eval()["eval"]
        outputs = trainer.predict(loader(shuffle=False))
    inputs, targets = pad(SAMPLES)
    expected = cross_entropy(trainer.state.model(inputs), targets).detach()

    torch.testing.assert_close(results["loss"].float(), expected, rtol=0, atol=1e-6)
    assert [len(one) for one in outputs] == [2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", ["1ba", "4ba"])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, stop, num_workers):
    """The position is in batches, whatever they are made of."""
    task = make_task(train_dataloader=lambda: loader(num_workers=num_workers))
    given = {"checkpoint_interval": "1ba", "run_dir": tmp_path / "stopped", "resume": "auto"}
    expected, _ = trained(task)

    stopped, _ = trained(task, until=stop, **given)
    resumed, _ = trained(task, **given)

    assert torch.equal(resumed, expected)
    assert not torch.equal(stopped, expected)


class Stream(IterableDataset):
    """Batches of a rank: rank 0 has one more, and other numbers of parts."""

    num_taken = 0

    def __iter__(self):
        rank, num_ranks = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
        for start, size in ((0, 1), (4, 2), (8, 3), (12, 1))[self.num_taken :]:
            mine = SAMPLES[start : start + 4][rank::num_ranks]
            if mine:
                self.num_taken += 1
                yield collated(pad, microbatch_size=size + rank)(mine)
        self.num_taken = 0

    def state_dict(self):
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state):
        self.num_taken = state["num_taken"]


def of_rank(**given):
    task = make_task(train_dataloader=Stream)
    return trained(task, **given)


def test_ranks_may_have_other_numbers_of_parts():
    """The mean is over all samples of a step; a rank without a batch pads with a part of its first."""
    expected, counted = of_rank()

    for weights, of_ranks in run_ranks(of_rank):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert of_ranks == counted


class Twice:
    """Asks for the gradients twice before each step, and counts what the ranks exchange."""

    def __init__(self):
        self.num_exchanges = 0

    @hookimpl
    def wrap_model(self, state):
        model = DistributedDataParallel(state.model)
        model.register_comm_hook(self, _count)
        return model

    @hookimpl
    def optimizer_step(self, state, optimizers, closure):
        closure()
        for optimizer in optimizers.values():
            optimizer.step()
        return True


def _count(counts, bucket):
    counts.num_exchanges += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def repeated():
    counts = Twice()
    task = make_task(train_dataloader=Stream, algorithms=[counts])
    return *trained(task), counts.num_exchanges


def test_a_closure_exchanges_gradients_once_on_each_rank():
    """Of other numbers of parts, too: else ranks would wait for each other for ever."""
    (weights, _, num), (others, _, of_other) = run_ranks(repeated, timeout_s=60)

    assert num == of_other
    assert torch.equal(weights, others)
    torch.testing.assert_close(weights, of_rank()[0], rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_a_rank_that_pads_resumes_with_the_same_bits(tmp_path):
    """What it pads with is in the checkpoint."""
    given = {"checkpoint_interval": "1ba", "run_dir": tmp_path, "resume": "auto"}
    expected = run_ranks(of_rank)

    run_ranks(of_rank, until="3ba", **given)
    resumed = run_ranks(of_rank, **given)

    assert all(map(torch.equal, [one for one, _ in resumed], [one for one, _ in expected]))


X, Y = torch.arange(6.0).reshape(3, 2), torch.arange(3)


def test_it_is_moved_counted_and_described_part_by_part():
    """Two parts aren't inputs and targets."""
    batch = Microbatches([(X, Y), (X[:1], Y[:1])])

    doubled = map_tensors(lambda one: one * 2, batch)

    assert isinstance(doubled, Microbatches)
    assert torch.equal(doubled.parts[1][0], X[:1] * 2)
    assert num_samples(batch) == 4
    assert describe(batch) == "Microbatches of 2 (tuple, tuple)"
    assert (is_pair(batch), targets_of(batch), inputs_of(batch)) == (False, None, batch)
    assert microbatches_of(batch) == batch.parts
    assert microbatches_of([X, Y]) == ([X, Y],)


def test_workers_that_are_spawned_can_have_it():
    """The collate function goes there, batches come back."""
    collate_fn = pickle.loads(pickle.dumps(collated(pad, microbatch_size=2)))

    batch = pickle.loads(pickle.dumps(collate_fn(SAMPLES[:3])))

    assert [[*inputs.shape] for inputs, _ in batch] == [[2, 9], [1, 1]]
    assert repr(batch).startswith("Microbatches([(tensor(")


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_without_a_meaning_is_refused(size):
    """With what was given."""
    with pytest.raises(ValueError, match=f"microbatch_size={size} is not an int of 1 or more"):
        collated(pad, microbatch_size=size)


@pytest.mark.parametrize("batch", [{"input_ids": torch.ones(2, 3)}, torch.ones(2, 3), "text"])
def test_a_batch_is_not_its_parts(batch):
    """The names of a mapping, or the rows of a tensor, would be taken for them."""
    with pytest.raises(TypeError, match=r"takes a list of batches, not a (dict|Tensor|str); write"):
        Microbatches(batch)


def test_a_batch_has_a_part():
    """One without would be a step without a gradient."""
    with pytest.raises(ValueError, match="Microbatches got no parts"):
        Microbatches([])
    with pytest.raises(ValueError, match="pass all parts to one Microbatches"):
        Microbatches([Microbatches([X])])


def test_loaders_side_by_side_give_no_parts():
    """The parts of one don't belong to those of the other."""
    both = zipped(a=loader(), b=loader(size=3))

    with pytest.raises(TaskError, match="zipped: 'a' yielded Microbatches of 3"):
        next(iter(both))
