"""The table of samples lost and repeated: exact, refused, or a doubt that is stated before training."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventloop_streaming.plugin import Streaming

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from stream_kills import killed
from stream_kinds import KINDS, prepare
from stream_resume import by_eventloop, resumed

# What is neither exact nor refused, and the words of the header or of a warning at the start.
DOUBTS = {
    "datasets, stream, 2 workers": "loses and repeats up to what 1 of 2 workers had read",
    "datasets, map and batches, 2 workers": "loses and repeats up to what 1 of 2 workers had read",
    "datasets, interleaved, 2 workers": "loses and repeats up to what 1 of 2 workers had read",
    "datasets, shuffle buffer": "goes on in mid-epoch loses and repeats up to 16;",
    "webdataset, shuffle buffer": "loses and repeats up to 16;",
    "webdataset, shuffle buffer, 2 workers": "loses and repeats up to 32;",
    "litdata, 2 workers": "loses and repeats up to all 96 samples",
}
REFUSED = {
    "generator": "used up after one epoch",
    "grain": "holds no tensor",
    "datasets, shuffle buffer, 2 workers": "can't load the state of a stream that is shuffled from",
}
# Ray Data starts services, which aren't for a test; the script has it.
INSTALLED = [
    name
    for name, kind in KINDS.items()
    if all(importlib.util.find_spec(one) is not None for one in kind.needs) and name != "Ray Data"
]
EXACT = [name for name in INSTALLED if name not in {**DOUBTS, **REFUSED}]
pytestmark = pytest.mark.filterwarnings("ignore")


def require_exact_refused_or_said(name, points, num_ranks):
    """Two stops each, the second one batch behind the first, at points of two epochs."""
    prepare(KINDS[name])
    found = resumed(by_eventloop, KINDS[name].make, points, num_ranks)

    if name in REFUSED:
        assert REFUSED[name] in found["refused"]
    elif name in DOUBTS:
        plugin = Streaming()
        plugin.init(SimpleNamespace(train_dataloader=KINDS[name].make(), data_world_size=1))
        assert any(
            DOUBTS[name] in said for said in (plugin.header_note(), *found.get("warnings", ()))
        )
    else:
        assert "lost" in found, found
        assert (found["lost"], found["repeated"], found["other order"]) == (0, 0, 0)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", INSTALLED)
def test_no_sample_is_lost_in_silence(name, num_ranks):
    """Each rank, and each worker of it, goes on with its own."""
    require_exact_refused_or_said(name, 2, num_ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", INSTALLED)
def test_no_sample_is_lost_at_ten_points(name, num_ranks):
    """Ends of epochs are among them."""
    require_exact_refused_or_said(name, 10, num_ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXACT)
def test_twenty_sigkills_leave_the_same_bits(name):
    """While the process starts, reads, trains or saves."""
    prepare(KINDS[name])

    found = killed(KINDS[name].make, 20, random.Random(name))

    assert "refused" not in found
    assert found["differing"] == []


def test_the_table_sees_a_loss(tmp_path):
    """Control: a source that says it has a state and begins anew each time."""

    class Forgets:
        def __iter__(self):
            return KINDS["generator"].make()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    found = resumed(by_eventloop, Forgets, 1)

    assert found["repeated"] > 0


class BeginsAnew:
    """A loader with a length that, loaded behind its last batch, begins the next epoch: litdata's."""

    def __init__(self):
        self.num = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.num %= len(self)
        for batch in KINDS["IterableDataset, DataLoader"].make():
            if self.num <= batch[0] // len(batch):
                self.num += 1
                yield batch

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


def test_a_stop_behind_the_last_batch_adds_no_epoch(tmp_path):
    """One of the three stops is there."""
    found = resumed(by_eventloop, BeginsAnew, 3)

    assert (found["lost"], found["repeated"], found["other order"]) == (0, 0, 0)
