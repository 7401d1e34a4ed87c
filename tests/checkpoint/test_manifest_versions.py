"""Checkpoints of every version of the format are read for ever.

`fixtures/version_N` was written once, by `python tests/checkpoint/test_manifest_versions.py`, when version N
was new; it is never written again. Version 2 is that of shards.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import manifest
from eventloop.checkpoint.checkpoint_files import Draft, read_checkpoint, write_checkpoint
from eventloop.checkpoint.safetensors_files import dtypes
from eventloop.checkpoint.store import Store
from eventloop.checkpoint.verifying import name_of
from eventloop.training.tensor_slices import TensorSlice

FIXTURES = Path(__file__).parent / "fixtures"
FACTS = {"metrics": {"loss": float("inf"), "accuracy": 0.5}, "plugins": ["mixup"], "steps": (1, 2)}


def parts():
    """Returns what version 1 holds: everything that a nest may be."""
    raw = torch.arange(32, dtype=torch.uint8)
    return {
        "model": {"1.weight": raw.view(torch.float32).view(2, 4), "0.count": torch.tensor(-7)},
        "every_dtype": {name: (raw % 2).view(dtype) for name, dtype in dtypes().items()},
        "nest": {
            "scalars": [
                None,
                True,
                0,
                -(2**63),
                2**63,
                10**30,
                0.1,
                -0.0,
                float("nan"),
                "ü\n",
                b"\0\xff",
            ],
            "keys": {0: "int", "0": "str", "$tensor": "dollar", "": "empty"},
            "empty": [{}, [], (), "", b"", torch.empty(0, 3)],
            "tensors": (torch.tensor(1.5), [torch.tensor([True])], {7: torch.tensor([2])}),
            "a": {"b": torch.tensor([1])},
            "a.b": torch.tensor([2]),
        },
        "no_tensors": {"step": 12},
        "nothing": {},
    }


@pytest.mark.parametrize("version", range(1, manifest.VERSION + 1))
def test_every_version_is_still_read(version, same):
    """A run may be resumed, and weights be used, years later."""
    folder = FIXTURES / f"version_{version}"
    path = folder / name_of(12)

    found = read_checkpoint(path)

    assert same(found.parts, dict(sorted(parts().items())))
    assert same(read_checkpoint(path).facts, FACTS)
    assert (found.batch, found.eventloop) == (12, "0.1.0")
    assert Store(folder).latest() == (path, [])


def test_the_fixture_of_today_is_what_is_written_today(tmp_path):
    """Otherwise the format has changed, and needs another version."""
    folder = FIXTURES / f"version_{manifest.VERSION}" / name_of(12)
    fresh = tmp_path / name_of(12)

    write_checkpoint(fresh, parts(), FACTS, batch=12)

    names = [sorted(one.name for one in path.iterdir()) for path in (folder, fresh)]
    assert names[0] == names[1]
    for name in names[0]:
        if name != manifest.MANIFEST:  # it names the eventloop that wrote it
            assert (folder / name).read_bytes() == (fresh / name).read_bytes()


def write_shards(folder):
    """Writes what two ranks hold: rows of a tensor, and a tensor that is whole."""
    whole = torch.arange(12.0).view(3, 4)
    drafts = []
    for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
        part = TensorSlice(whole[rows], (3, 4), (rows.start, 0))
        nests = {"model": {"w": part, "n": torch.tensor(7)}, f"rank{rank}": {"idx": rank}}
        drafts.append(Draft(nests, FACTS, 12, rank, 2))
    folder.mkdir(parents=True)
    files = [draft.write_files(folder) for draft in drafts]
    drafts[0].write_manifest(folder, files[0] | files[1])


def test_shards_of_version_2_are_still_read(tmp_path, same):
    """And written as they were."""
    path, fresh = FIXTURES / "version_2" / name_of(12), tmp_path / name_of(12)

    write_shards(fresh)

    model = {"w": torch.arange(12.0).view(3, 4), "n": torch.tensor(7)}
    expected = {"model": model, "rank0": {"idx": 0}, "rank1": {"idx": 1}}
    for one in (path, fresh):
        assert same(read_checkpoint(one).parts, expected)
        assert same(read_checkpoint(one).facts, FACTS)
    for one in path.iterdir():
        if one.name != manifest.MANIFEST:  # it names the eventloop that wrote it
            assert one.read_bytes() == (fresh / one.name).read_bytes()


if __name__ == "__main__":
    write_shards(FIXTURES / "version_2" / name_of(12))
