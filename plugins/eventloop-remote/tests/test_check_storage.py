"""`check_storage`: it accepts a right storage, and says what is wrong with another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eventloop_remote import RemoteFolder, RemoteStorage
from eventloop_remote.testing import check_storage


class Shelf(RemoteFolder):
    """A folder in memory, as it should be."""

    def __init__(self, shelf):
        self.shelf = shelf

    def names(self):
        return list(self.shelf)

    def sizes(self, name):
        return {file: len(data) for file, data in self.shelf.get(name, {}).items()}

    def read(self, name, file, num_bytes):
        try:
            return self.shelf[name][file][:num_bytes]
        except KeyError:
            raise FileNotFoundError(file) from None

    def upload(self, name, file, source):
        data = source.read_bytes()
        self.shelf.setdefault(name, {})[file] = data

    def remove(self, name):
        del self.shelf[name]


class WholeOnes(Shelf):
    def names(self):
        return [name for name, files in self.shelf.items() if "manifest.json" in files]


class OfNothing(Shelf):
    def read(self, name, file, num_bytes):
        return self.shelf.get(name, {}).get(file, b"")[:num_bytes]


class AllBytes(Shelf):
    def read(self, name, file, num_bytes):
        return super().read(name, file, 10**9)


class Silent(Shelf):
    def upload(self, name, file, source):
        if source.exists():
            super().upload(name, file, source)


class Early(Shelf):
    def upload(self, name, file, source):
        self.shelf.setdefault(name, {})[file] = b""
        super().upload(name, file, source)


class KeepsAll(Shelf):
    def remove(self, name):
        pass


class Forgetful(Shelf):
    def __init__(self, shelf):
        super().__init__({})


def shelves(kind):
    """Returns a storage of folders of a kind."""
    shelf = {}
    return RemoteStorage(lambda url: kind(shelf))


def test_a_right_storage_keeps_the_contract(tmp_path):
    """Control: nothing else is wrong with those below."""
    check_storage(shelves(Shelf), "mem://run", tmp_path)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (WholeOnes, "half uploaded, too"),
        (OfNothing, "must raise FileNotFoundError"),
        (AllBytes, "10 bytes at most"),
        (Early, "when it was uploaded"),
        (Silent, "must raise"),
        (KeepsAll, "can be removed"),
        (Forgetful, "what is there"),
    ],
)
def test_a_wrong_storage_is_told_what_is_wrong(kind, what, tmp_path):
    """A checker that finds nothing would be worse than none."""
    with pytest.raises(AssertionError, match=what):
        check_storage(shelves(kind), "mem://run", tmp_path)


def test_a_storage_of_another_package_imports_no_fsspec():
    """It takes time, and a file of a database needs nothing of it."""
    code = "import sys, eventloop_remote; sys.exit('fsspec' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
