"""Data loaders that are made like another one."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from eventloop_curriculum import remade, shortened
from eventloop_curriculum.loaders import Shortened

DATA = TensorDataset(torch.arange(12), torch.arange(12))


def flat(dataloader):
    return torch.cat([inputs for inputs, _ in dataloader])


def nothing(worker):
    pass


class Loader(DataLoader):
    """A class of somebody's own."""


def test_everything_but_the_size_is_kept():
    """Who set workers or a sampler wants them with larger batches, too."""
    generator = torch.Generator().manual_seed(0)
    loader = Loader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * 12, 12, generator=generator), num_workers=2,
        drop_last=True, timeout=60, worker_init_fn=nothing, generator=generator, prefetch_factor=3,
        persistent_workers=True, in_order=False, multiprocessing_context="fork",
    )  # fmt: skip
    kept = [
        name
        for name in vars(loader)
        if name[0] != "_" and name not in ("batch_size", "batch_sampler")
    ]

    larger = remade(loader, batch_size=6)

    assert type(larger) is Loader
    assert {name: getattr(larger, name) for name in kept} == {
        name: getattr(loader, name) for name in kept
    }
    assert larger.multiprocessing_context is loader.multiprocessing_context
    assert (larger.batch_size, loader.batch_size, len(larger)) == (6, 4, 2)


def test_the_same_samples_come_in_the_same_order():
    """The sampler is the same, and draws what it would have drawn."""
    made = DataLoader(DATA, 4, shuffle=True)

    torch.manual_seed(1)
    expected = flat(made)
    torch.manual_seed(1)
    actual = flat(remade(made, batch_size=5))

    assert torch.equal(actual, expected)
    assert not torch.equal(flat(made), expected)


class Stream(IterableDataset):
    """Gives pairs, without a length."""

    def __iter__(self):
        return iter([(idx, idx) for idx in range(10)])


def test_a_stream_has_larger_batches():
    """It has no sampler that could be kept."""
    sizes = [len(inputs) for inputs, _ in remade(DataLoader(Stream(), 2), batch_size=4)]

    assert sizes == [4, 4, 2]


@pytest.mark.parametrize(
    "given",
    [{"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, False)}, {"batch_size": None}],
)
def test_batches_of_somebody_else_are_refused(given):
    """A batch sampler knows alone how it makes them."""
    with pytest.raises(ValueError, match="made by the data set or by a batch sampler"):
        remade(DataLoader(DATA, **given), batch_size=8)


def test_sequences_are_cut_and_nothing_else():
    """Inputs, targets and masks alike; images, labels and numbers beside them stay."""
    batch = {
        "x": torch.zeros(2, 9, 3),
        "mask": torch.ones(2, 9),
        "labels": torch.tensor([1, 2]),
        "soft": torch.zeros(2, 10),
        "name": "a",
    }

    cut = shortened(batch, 4)

    assert {key: getattr(value, "shape", None) for key, value in cut.items()} == {
        "x": (2, 4, 3), "mask": (2, 4), "labels": (2,), "soft": (2, 10), "name": None,
    }  # fmt: skip
    assert shortened(batch, 9) is batch


def test_workers_cut_what_they_make():
    """Nothing is copied that is thrown away."""
    loader = DataLoader(TensorDataset(torch.zeros(4, 8), torch.zeros(4, 8)), 2, num_workers=1)

    (first, *_) = remade(loader, seq_len=3)

    assert [one.shape for one in first] == [(2, 3), (2, 3)]
    assert isinstance(remade(loader, batch_size=4).collate_fn, Shortened) is False
