"""The format: what was written is read; what was changed by a bit is refused, with the reason."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import eventloop
from eventloop.checkpoint import manifest
from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop.errors import CheckpointError

FACTS = {"loss": float("nan"), "eval": {"test": {"accuracy": 0.5}}, "steps": (1, 2)}


@pytest.fixture
def folder(parts, tmp_path):
    """A folder with a checkpoint of batch 3."""
    write_checkpoint(tmp_path / "ba00000003", parts, FACTS, batch=3)
    return tmp_path / "ba00000003"


@pytest.fixture
def refused(folder):
    """Asserts that it isn't read; gives the message."""

    def refused():
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(folder)
        message = str(caught.value)
        assert message.startswith(f"the checkpoint {str(folder)!r} can't be used: ")
        assert "\n  fix  " in message
        return message

    return refused


def rewrite(folder, **changes):
    """Writes the manifest again, with digests as it should have them, as a stranger would."""
    found = dataclasses.replace(manifest.read_manifest(folder), **changes)
    (folder / manifest.MANIFEST).write_bytes(manifest.manifest_bytes(found))


# What holds


def test_a_checkpoint_comes_back(folder, parts, same):
    """All of it, to the bit."""
    found = read_checkpoint(folder)

    assert same(found.parts, dict(sorted(parts.items())))
    assert same(found.facts, FACTS)
    assert (found.path, found.batch, found.eventloop) == (folder, 3, eventloop.__version__)
    assert same(read_checkpoint(folder).facts, FACTS)


def test_a_part_is_one_or_two_files(folder):
    """Weights alone are a safetensors file; what has no tensors is JSON."""
    assert sorted(one.name for one in folder.iterdir()) == [
        "clock.json",
        "manifest.json",
        "model.safetensors",
        "optimizers.json",
        "optimizers.safetensors",
    ]


def test_the_same_parts_give_the_same_bytes(folder, parts, tmp_path):
    """Two runs can be compared by their files; no time, no place and no name gets in."""
    write_checkpoint(tmp_path / "other", parts, FACTS, batch=3)

    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_some_parts_are_read_alone(folder, parts, same):
    """Weights without the rest; another part may even be damaged."""
    (folder / "optimizers.safetensors").unlink()

    assert same(read_checkpoint(folder, only=["model"]).parts, {"model": parts["model"]})
    assert read_checkpoint(folder, only=[]).parts == {}
    with pytest.raises(CheckpointError, match=r"no part 'ema', only clock, model, optimizers"):
        read_checkpoint(folder, only=["model", "ema"])


def test_files_that_nobody_vouches_for_are_left_alone(folder):
    """Some file systems leave their own."""
    (folder / ".DS_Store").touch()

    read_checkpoint(folder)


def test_a_checkpoint_of_no_run_may_stand_anywhere(parts, tmp_path):
    """Without a batch; an empty one is one, too."""
    write_checkpoint(tmp_path / "a" / "b", {}, {})

    assert read_checkpoint(tmp_path / "a" / "b").batch is None


# What can't be saved


@pytest.mark.parametrize(
    "name", ["", "Model", "../a", "a/b", ".a", "manifest", "a" * 101, "ü", "a\n"]
)
def test_a_part_has_the_name_of_a_file(name, tmp_path):
    """On every file system."""
    with pytest.raises(CheckpointError, match="no part of a checkpoint can be called"):
        write_checkpoint(tmp_path / "a", {name: {}}, {})

    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("parts", "facts", "message"),
    [
        ({"a": {"b": object()}}, {}, "'a.b' can't be saved: it is an object"),
        ({}, {"a": {"b": object()}}, "'facts.a.b' can't be saved: it is an object"),
        ({}, {"a": [torch.ones(1)]}, "facts.a.0 is a tensor"),
        (
            {"a": [0] * 600_000},
            {},
            r"'a' can't be saved: its JSON has 600,000 items[\s\S]*torch.tensor",
        ),
        ({}, {"a": [0] * 600_000}, "'facts' can't be saved: its JSON has"),
        ({"a": {"b": torch.ones(1).cdouble()}}, {}, "'a.safetensors: b' can't be saved"),
    ],
)
def test_what_can_not_be_saved_is_found_before_anything_is_written(parts, facts, message, tmp_path):
    """Whatever was there stays as it was."""
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "a", parts, facts)

    assert not (tmp_path / "a").exists()


def test_no_file_is_replaced(folder, parts):
    """A checkpoint is written once; `Store` replaces whole folders."""
    before = {one: one.read_bytes() for one in folder.iterdir()}

    with pytest.raises(CheckpointError, match=r"can't be written to .*File exists"):
        write_checkpoint(folder, parts, FACTS, batch=4)

    assert {one: one.read_bytes() for one in folder.iterdir()} == before


# Versions


def test_a_newer_version_names_the_eventloop_that_wrote_it(folder, refused, monkeypatch):
    """It may have changed anything but where the version stands."""
    monkeypatch.setattr(manifest, "VERSION", 3)
    rewrite(folder, eventloop="7.1.0")
    monkeypatch.undo()

    message = refused()

    assert "version 3 of the format, written by eventloop '7.1.0'" in message
    assert f"this is eventloop {eventloop.__version__!r}" in message
    assert "pip install --upgrade torch-eventloop" in message
    (folder / "manifest.json").write_text(
        json.dumps({"format": manifest.FORMAT, "version": 9, "eventloop": "8.0.0"})
    )
    assert "version 9 of the format, written by eventloop '8.0.0'" in refused()


@pytest.mark.parametrize("version", [0, -1, 1.0, True, None, "1"])
def test_a_version_that_never_was_is_refused(version, folder, refused, monkeypatch):
    """Nothing is guessed."""
    found = manifest.read_manifest(folder)
    monkeypatch.setattr(manifest, "VERSION", version)
    (folder / manifest.MANIFEST).write_bytes(manifest.manifest_bytes(found))
    monkeypatch.undo()

    assert "the format has no version" in refused()


def test_an_older_version_has_its_reader(folder, same, monkeypatch):
    """The migration path: a table from versions to functions that give today's manifest."""
    readers = manifest._READERS | {3: lambda value: manifest._READERS[1](value["inside"])}
    monkeypatch.setattr(manifest, "VERSION", 3)
    monkeypatch.setattr(manifest, "_READERS", readers)

    assert same(read_checkpoint(folder).facts, FACTS)
    assert set(readers) == set(range(1, 4))


def test_every_version_up_to_this_has_a_reader():
    """None is ever taken away."""
    assert set(manifest._READERS) == set(range(1, manifest.VERSION_OF_SHARDS + 1))
