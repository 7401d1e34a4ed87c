"""Records of a run in a store that strangers write to, too."""

from __future__ import annotations

import json

import pytest
from torch.distributed import HashStore

from eventloop.distributed.sealed_records import SealedRecords, new_token


def records_of(store: HashStore, token: str) -> SealedRecords:
    return SealedRecords(store, token)


def test_ranks_with_one_token_read_each_other_s_records():
    """Both values of a key and those that come first."""
    store, token = HashStore(), new_token()
    records_of(store, token).write("a", [1, "text", True])

    reader = records_of(store, token)

    assert reader.read("a") == [1, "text", True]
    assert reader.read("b") is None
    assert reader.write_first("a", "mine") == [1, "text", True]
    assert reader.write_first("b", "mine") == "mine"


@pytest.mark.parametrize("forged", ["", "{}", "x" * 200, "[" * 100_000, "\x00\xff"])
def test_a_text_without_a_seal_reads_as_nothing(forged):
    """Whoever reaches the port may write anything."""
    store, token = HashStore(), new_token()
    store.set("a", forged)

    assert records_of(store, token).read("a") is None


def test_a_record_that_another_token_sealed_reads_as_nothing():
    """A stranger knows the form of the records."""
    store = HashStore()
    records_of(store, new_token()).write("a", "forged")

    assert records_of(store, new_token()).read("a") is None


def test_a_record_that_was_moved_to_another_key_reads_as_nothing():
    """Rank 1's end isn't rank 2's."""
    store, token = HashStore(), new_token()
    records = records_of(store, token)
    records.write("member/1", "left")
    store.set("member/2", store.get("member/1"))

    assert records.read("member/2") is None


def test_a_changed_record_reads_as_nothing():
    """Each byte is under the seal."""
    store, token = HashStore(), new_token()
    records = records_of(store, token)
    records.write("a", "status 1")
    store.set("a", store.get("a").replace(b"1", b"0"))

    assert records.read("a") is None


def test_a_forged_record_gives_way_to_a_rank_s():
    """Otherwise a stranger who is first keeps the ranks from reporting a failure."""
    store, token = HashStore(), new_token()
    store.set("a", json.dumps("forged"))

    assert records_of(store, token).write_first("a", "true") == "true"
    assert records_of(store, token).write_first("a", "late") == "true"


def test_tokens_are_long_and_differ():
    """They can't be guessed."""
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) == 64
