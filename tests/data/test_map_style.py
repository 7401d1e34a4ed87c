"""A data loader without workers is read as torch's own iterator reads it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from eventloop.data.loaders import loader_of
from eventloop.data.map_style import iterate
from eventloop.distributed.processes import Processes


class Numbers(Dataset):
    """Samples of an index, one of which may fail."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def __len__(self):
        return 11

    def __getitem__(self, idx):
        if idx == self.fails_at:
            raise LookupError(f"sample {idx}")
        return torch.tensor([idx, idx + 1]), str(idx)


class AtOnce(Numbers):
    """Reads a batch at once."""

    def __getitems__(self, indices):
        return [self[idx] for idx in reversed(indices)]


def as_list(samples):
    assert isinstance(samples, list)
    return [label for _, label in samples]


def read(loader, begin):
    """Returns two epochs, and where the global generator stands after them."""
    torch.manual_seed(3)
    batches = [repr(batch) for _ in range(2) for batch in begin(loader)]
    return batches, torch.get_rng_state().tolist()


@pytest.mark.parametrize("dataset", [Numbers(), AtOnce()], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "drop_last": True},
        {"shuffle": True, "collate_fn": as_list},
        {"batch_size": None},
        {"sampler": [3, 1, 3]},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_batches_and_draws_are_those_of_torch(dataset, options):
    """The shuffled orders after it would otherwise be others than in a plain loop."""
    loader = DataLoader(dataset, **{"batch_size": 3, **options})

    assert read(loader, iterate) == read(loader, iter)


def test_a_generator_of_the_loader_s_moves_as_under_torch():
    """Its seed for workers comes from there, and is drawn when a pass begins."""
    states = []
    for begin in (iterate, iter):
        generator = torch.Generator().manual_seed(5)
        begin(DataLoader(Numbers(), 3, shuffle=True, generator=generator))
        states.append(generator.get_state().tolist())

    assert states[0] == states[1] != torch.Generator().manual_seed(5).get_state().tolist()


def test_after_an_error_it_goes_on_with_the_next_batch():
    """A generator would be over, and the epoch end without a word."""
    batches = iterate(DataLoader(Numbers(fails_at=4), 3))

    assert next(batches)[1] == ("0", "1", "2")
    with pytest.raises(LookupError, match="sample 4"):
        next(batches)
    assert next(batches)[1] == ("6", "7", "8")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_another_class_is_asked_itself(num_workers):
    """What a subclass does in `__iter__` is its own."""

    class Doubled(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield from (batch, batch)

    loader = Doubled(Numbers(), 4, num_workers=num_workers)

    assert len(list(iterate(loader))) == 2 * len(loader)


def test_a_position_within_an_epoch_has_the_state_at_its_start():
    """A resumed run draws the order again from there; between epochs the present state is enough."""
    loader = DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    source = loader_of(loader).source(Processes(), 0)
    between = source.state_dict(None)
    batches = source.batches(0)
    next(batches)
    within = source.state_dict(1)

    assert between["start"] is None
    assert within["start"] != within["now"]

    resumed = loader_of(
        DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    ).source(Processes(), 0)
    resumed.load_state_dict(within, 0, 1)

    assert list(map(repr, resumed.batches(0, 1))) == list(map(repr, batches))
