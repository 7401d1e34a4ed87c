"""CorruptFileError to the checkpoint of a run: the one before is gone on from, and the damaged one is named.

`tests/checkpoint/test_verifying.py` does the same to the format alone, byte by byte.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError

PAGE_BYTES = 4096
FLIPS = 40  # with every change; a night has 600
CorruptFileError = Callable[[Path, random.Random], None]


@pytest.fixture
def checkpoints(make_trainer, tmp_path) -> Path:
    """The folder of a run's three checkpoints, of which the newest is damaged by each test."""
    make_trainer(run_dir=tmp_path / "run", checkpoint_interval="1ba", max_duration="2ba").fit()
    return tmp_path / "run" / "checkpoints"


def flip_bit(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def zero_page(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data)) // PAGE_BYTES * PAGE_BYTES
    end = min(start + PAGE_BYTES, len(data))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def append(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(draw.randrange(1, PAGE_BYTES)))


def duplicate_page(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data + data[:PAGE_BYTES])


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap_with_next(path: Path, draw: random.Random) -> None:
    paths = sorted(path.parent.iterdir())
    other = paths[(paths.index(path) + 1) % len(paths)]
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def take_from_before(path: Path, draw: random.Random) -> None:
    """A file of the checkpoint before, in this one's place; the same bytes aren't damage."""
    before = path.parent.with_name("ba00000001") / path.name
    if not before.exists() or before.read_bytes() == path.read_bytes():
        flip_bit(path, draw)
    else:
        shutil.copy(before, path)


def to_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


KINDS = (flip_bit, truncate, zero_page, append, duplicate_page, empty, remove, swap_with_next)
KINDS += (take_from_before, to_folder)


def test_what_isnt_damaged_is_used(checkpoints):
    """The negative control."""
    assert Store(checkpoints).latest() == (checkpoints / "ba00000002", [])


@pytest.mark.parametrize("kind", KINDS)
def test_damage_to_every_file_is_found(kind, checkpoints):
    """Whatever files a checkpoint has, each is damaged in each way."""
    damage_each(checkpoints, kind, random.Random(0), times=1)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_damage_to_every_file_is_found_at_night(kind, seed, checkpoints):
    """At five places of each file, by five draws."""
    damage_each(checkpoints, kind, random.Random(seed), times=5)


def test_flipped_bits_are_found(checkpoints):
    """Anywhere in all files."""
    flip(checkpoints, FLIPS)


@pytest.mark.nightly
def test_600_flipped_bits_are_found(checkpoints):
    """As many as there is time for at night."""
    flip(checkpoints, 600)


def flip(checkpoints: Path, times: int) -> None:
    draw = random.Random(1)
    paths = sorted((checkpoints / "ba00000002").iterdir())
    for path in draw.choices(paths, [one.stat().st_size for one in paths], k=times):
        require_found(checkpoints, path, flip_bit, draw)


def damage_each(checkpoints: Path, kind: CorruptFileError, draw: random.Random, times: int) -> None:
    paths = sorted((checkpoints / "ba00000002").iterdir())
    assert len(paths) > 5
    for path in paths * times:
        require_found(checkpoints, path, kind, draw)


def require_found(
    checkpoints: Path, path: Path, kind: CorruptFileError, draw: random.Random
) -> None:
    """Damages a file, requires that it is found by all who read, and puts it right again."""
    newest, whole = path.parent, checkpoints.with_name("whole")
    shutil.copytree(newest, whole)
    kind(path, draw)

    latest, refused = Store(checkpoints).latest()
    assert latest == checkpoints / "ba00000001"
    assert [one for one, _ in refused] == [newest]
    with pytest.raises(CheckpointError, match="can't be used"):
        read_checkpoint(newest)

    shutil.rmtree(newest)
    whole.rename(newest)
