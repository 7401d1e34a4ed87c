"""Batches of similar lengths: each sample once, little padding, the same bits after a resume."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from eventloop import Task, hookimpl
from eventloop.data import collated
from eventloop_streaming.bucketing import LengthBatchSampler, TokenBatchSampler
from eventloop_testing import isolated_trainer, run_ranks

LENGTHS = torch.randn(203, generator=torch.Generator().manual_seed(0)).mul(0.8).add(3).exp().int()
SAMPLES = [torch.full((num,), 1 + num % 7) for num in LENGTHS.tolist()]


def padded(lengths, batches):
    """Returns how many times the tokens of an epoch it computes, padded."""
    return sum(len(one) * int(lengths[one].max()) for one in batches) / int(lengths.sum())


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=80),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_each_sample_comes_once(lengths, size, shuffle, by_tokens):
    """Whatever the lengths are; an epoch has as many batches as its length says."""
    if by_tokens:
        size = max(size, *lengths, 1)
    kind = TokenBatchSampler if by_tokens else LengthBatchSampler
    sampler = kind(lengths, size, shuffle=shuffle)

    batches = [*sampler]

    assert sorted(idx for one in batches for idx in one) == [*range(len(lengths))]
    assert len(sampler) == len(batches)
    if by_tokens:
        assert all(len(one) * max(lengths[idx] for idx in one) <= size for one in batches)
    else:
        assert len(batches) == -(-len(lengths) // size)
        assert sum(len(one) < size for one in batches) <= 1


def test_little_is_padded():
    """With log-normal lengths, of which batches of any samples compute four times as many."""
    lengths = torch.randn(20_000, generator=generator()).mul(0.8).add(3).exp().int()
    by_chance = torch.randperm(20_000, generator=generator()).split(32)
    by_tokens = [*TokenBatchSampler(lengths, 4096)]

    assert padded(lengths, [one.tolist() for one in by_chance]) > 4
    assert padded(lengths, [*LengthBatchSampler(lengths, 32)]) < 1.05
    assert padded(lengths, by_tokens) < 1.05
    assert len(by_tokens) < 1.07 * lengths.sum() / 4096


def test_epochs_differ_in_batches_and_in_their_order():
    """Not the same samples together each time."""
    torch.manual_seed(0)
    sampler = LengthBatchSampler(LENGTHS, 8)

    first, second = [*sampler], [*sampler]

    assert {frozenset(one) for one in first} != {frozenset(one) for one in second}
    longest = [int(LENGTHS[one].max()) for one in first]
    assert longest != sorted(longest)
    own = [[*LengthBatchSampler(LENGTHS, 8, generator=generator())] for _ in range(2)]
    assert own[0] == own[1]


def generator():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("kind", ["uint16", "int32", "reversed", "generator"])
def test_lengths_are_ints_of_any_kind(kind):
    """As numpy has them, or what counts them."""
    numbers = numpy.array([3, 9, 4, 7])
    lengths = {
        "uint16": numbers.astype("uint16"),
        "int32": numbers.astype("int32"),
        "reversed": numbers[::-1],
        "generator": (one for one in numbers.tolist()),
    }[kind]

    assert sorted(idx for one in LengthBatchSampler(lengths, 3) for idx in one) == [0, 1, 2, 3]


def test_without_shuffling_they_come_from_short_to_long():
    """As an evaluation may take them."""
    batches = [*TokenBatchSampler(LENGTHS, 512, shuffle=False)]

    assert [int(LENGTHS[idx]) for one in batches for idx in one] == sorted(LENGTHS.tolist())
    assert batches == [*TokenBatchSampler(LENGTHS, 512, shuffle=False)]


def test_a_last_batch_may_be_dropped():
    """Of 203 samples in batches of 8 the last has 3."""
    assert len(LengthBatchSampler(LENGTHS, 8)) == 26
    assert len([*LengthBatchSampler(LENGTHS, 8, drop_last=True)]) == 25
    assert len(LengthBatchSampler(LENGTHS[:200], 8, drop_last=True)) == 25


class Classifies(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.words(ids).sum(1))


def pad(samples):
    return pad_sequence(samples, batch_first=True), torch.tensor([len(one) % 3 for one in samples])


class Shapes:
    """Keeps how many samples and tokens, padded, each batch has."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def batch_start(self, state):
        self.seen.append([tuple(inputs.shape) for inputs, _ in state.batch])


def trained(folder, kind, num_workers=0, until=None, **settings):
    """Trains two epochs; returns weights and the shapes of batches."""

    def loader():
        sampler = (
            TokenBatchSampler(LENGTHS, 512) if kind == "tokens" else LengthBatchSampler(LENGTHS, 8)
        )
        collate_fn = collated(pad, microbatch_size=3)
        given = {"num_workers": num_workers, "collate_fn": collate_fn}
        return DataLoader(SAMPLES, batch_sampler=sampler, **given)

    task = Task(
        model=Classifies,
        loss=cross_entropy,
        train_dataloader=loader,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )
    shapes = Shapes()
    given = {"max_duration": "2ep", "callbacks": [shapes]} | settings
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit(until=until)
        weights = [one.detach().clone() for one in trainer.state.model.parameters()]
        return weights, shapes.seen, trainer.state.clock.sample


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["tokens", "lengths"])
@pytest.mark.parametrize("stop", ["5ba", "20ba"])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, kind, num_workers, stop):
    """In the middle of an epoch, in the first as in the second."""
    given = {"checkpoint_interval": "1ba", "num_workers": num_workers}
    expected, shapes, num = trained(tmp_path / "whole", kind, **given)

    _, before, _ = trained(tmp_path / "stopped", kind, until=stop, **given)
    resumed, after, _ = trained(tmp_path / "stopped", kind, **given)

    assert num == 2 * len(SAMPLES)
    assert before + after == shapes
    assert all(map(torch.equal, resumed, expected))


def waited(ours, theirs):
    """Returns how much longer batches of the same step are; a rank may have one more."""
    return sum(abs(one - other) for one, other in zip(ours, theirs, strict=False))


@pytest.mark.parametrize("kind", ["tokens", "lengths"])
def test_ranks_share_the_batches_and_compute_as_long_ones(tmp_path, kind):
    """A step waits for its longest batch; each sample is seen once."""
    ranks = run_ranks(trained, tmp_path, kind, max_duration="1ep")

    assert [num for *_, num in ranks] == [len(SAMPLES)] * 2
    assert all(map(torch.equal, ranks[0][0], ranks[1][0]))
    ours, theirs = ([max(length for _, length in one) for one in seen] for _, seen, _ in ranks)
    assert waited(ours, theirs) < 0.5 * waited(ours, theirs[::-1])


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: LengthBatchSampler([], 2), "lengths is empty: give one int of 0 or more"),
        (lambda: LengthBatchSampler([1.5], 2), "lengths has 1.5"),
        (lambda: LengthBatchSampler(torch.ones(2), 2), "lengths has 1.0"),
        (lambda: LengthBatchSampler([[1]], 2), "lengths has [1]"),
        (lambda: LengthBatchSampler([True], 2), "lengths has True"),
        (lambda: LengthBatchSampler(["a"], 2), "lengths has 'a'"),
        (lambda: TokenBatchSampler([3, -1], 4), "lengths has -1"),
        (lambda: LengthBatchSampler([1], 0), "batch_size=0 is not an int of 1 or more"),
        (lambda: TokenBatchSampler([1], 2.0), "max_tokens=2.0 is not an int of 1 or more"),
        (lambda: TokenBatchSampler([3, 9], 8), "sample 1 has 9 tokens, more than max_tokens=8"),
    ],
)
def test_arguments_without_a_meaning_are_refused(make, shown):
    """With what was given."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        make()
