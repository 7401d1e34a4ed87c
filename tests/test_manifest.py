"""The manifest: what a run is made of."""

from __future__ import annotations

import json

from eventloop.cli import main
from eventloop.manifest import write_manifest

TOKENS = """
import torch
from eventloop import Task

def task():
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2).long()}
    return Task(
        model=torch.nn.Embedding(4, 4),
        forward=lambda model, inputs: model(inputs["input_ids"]).mean(1),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[batch],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"max_duration": "1ba", "device": "cpu"},
    )
"""
PICKY = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def close(self): pass

    def unsuitable(self, state):
        return "the batch has no float tensor"
"""
NEEDY = """
class Plugin:
    def __init__(self, *, teacher: str): pass
"""


def test_plugins_that_stand_off_are_in_header_and_manifest_with_their_reasons(
    clean, install, capsys
):
    """Installed means active, softened in two ways that are never silent."""
    install("aa-picky", PICKY)
    install("bb-needy", NEEDY)
    (clean / "tokens.py").write_text(TOKENS)

    status = main(["fit", "tokens.py", "--run-dir", "out"])

    header = capsys.readouterr().out
    off = {one["name"]: one["reason"] for one in json.loads(_text(clean))["off"]}
    assert status == 0
    assert off["aa-picky"] == "the batch has no float tensor"
    assert off["bb-needy"] == "waiting for --bb-needy.teacher"
    assert "aa-picky (the batch has no float tensor)" in header
    assert "bb-needy (waiting for --bb-needy.teacher)" in header


def test_naming_an_unsuitable_plugin_makes_it_an_error(clean, install, capsys):
    """Who asks for it must learn that it can't work here."""
    install("aa-picky", PICKY)
    (clean / "tokens.py").write_text(TOKENS)

    status = main(["fit", "tokens.py", "-p", "aa-picky"])

    assert status == 1
    assert "aa-picky was asked for, but doesn't suit this task" in capsys.readouterr().err


def test_requiring_an_unsuitable_plugin_names_the_line(clean, install, capsys):
    """It stands in a file that somebody else may have written."""
    install("aa-picky", PICKY)
    (clean / "tokens.py").write_text(TOKENS)
    (clean / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["aa-picky"]\n')

    assert main(["fit", "tokens.py"]) == 1
    message = capsys.readouterr().err

    assert "by      required, pyproject.toml" in message
    assert "fix     take 'aa-picky' out of `required = [...]`" in message


def test_a_manifest_says_what_the_run_is_made_of(make_trainer, make_plugin, tmp_path):
    """From it somebody else could make the run again."""
    trainer = make_trainer(callbacks=[make_plugin("watch", batch_end=lambda state: None)], seed=3)

    manifest = json.loads(write_manifest(trainer.state.manifest, tmp_path / "run").read_text())

    assert [one["name"] for one in manifest["plugins"]] == ["watch"]
    assert manifest["settings"]["seed"] == 3
    assert manifest["settings"]["max_duration"] == "1ep"
    assert manifest["order"].startswith("sha256:")
    assert {"torch", "python", "eventloop"} <= manifest["versions"].keys()


def _text(folder):
    return (folder / "out" / "manifest.json").read_text()
