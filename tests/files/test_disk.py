"""Files are written whole, read once, and nothing but a file is read."""

from __future__ import annotations

import hashlib
import os

import pytest

from eventloop.files import disk
from eventloop.files.disk import CorruptFileError, NewFile, OldFile, name_under_way, replace_file


def test_a_file_is_replaced_and_not_what_a_link_leads_to(tmp_path):
    """A link may lead out of the run; what a killed process left of the new file is in nobody's way."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"another's")
    link.symlink_to(target)
    (tmp_path / name_under_way("link")).symlink_to(target)

    replace_file(link, b"ours")

    assert (link.is_symlink(), link.read_bytes()) == (False, b"ours")
    assert target.read_bytes() == b"another's"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "target"]


def test_a_digest_is_that_of_all_bytes_in_any_pieces(tmp_path, monkeypatch):
    """Written and read in chunks, skipped to the end; bytes that are read at a position don't count."""
    monkeypatch.setattr(disk, "CHUNK_BYTES", 4)
    data, middle = bytes(range(26)), bytearray(5)
    with NewFile(tmp_path / "file") as new:
        new.write(data[:3])
        new.write(data[3:])

    with OldFile(tmp_path / "file") as old:
        first = old.read(11)
        old.fill_at(memoryview(middle), 13)
        old.skip()

    assert (first, bytes(middle)) == (data[:11], data[13:18])
    assert new.digest() == old.digest() == hashlib.sha256(data).hexdigest()
    assert new.num_bytes == old.num_bytes == 26


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(__file__), "it is a link to somewhere else"),
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is not a regular file"),
        (lambda path: None, "it can't be read: No such file or directory"),
    ],
    ids=["link", "pipe", "folder", "nothing"],
)
def test_only_a_file_is_read(make, reason, tmp_path):
    """A pipe would be waited for, and a link leads to what nothing vouches for."""
    make(tmp_path / "file")

    for look in (OldFile, disk.num_bytes_of):
        with pytest.raises(CorruptFileError, match=reason):
            look(tmp_path / "file")


def test_a_file_that_is_cut_off_while_it_is_read_is_damage(tmp_path):
    """Its size was known when it was opened."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))

    with OldFile(path) as file:
        os.truncate(path, 60)
        with pytest.raises(CorruptFileError, match="it ends early, 40 bytes before its end"):
            file.skip()
