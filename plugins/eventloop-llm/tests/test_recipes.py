"""The recipes, each as a user runs it."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from eventloop.cli import main

FOLDER = Path(__file__).parents[1]
# By recipe: what is logged, and which value it has or passes.
LEARNT = {
    "sft": ("eval/loss", "<", 5.5),
    "packing": ("eval/loss", "<", 5.5),
    "lora": ("eval/loss", "<", 6.8),
    "hf-checkpoints": ("train/loss", "<", 5.5),
    "dpo": ("eval/rewards/accuracy", ">", 0.6),
    "reward": ("eval/rewards/accuracy", ">", 0.6),
    "grpo": ("grpo/reward", ">", 0.2),
}


def test_each_recipe_is_tried():
    """And says how it is run."""
    recipes = {
        path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("recipes/*.yaml")
    }

    assert recipes.keys() == LEARNT.keys()
    for name, text in recipes.items():
        assert f"--config plugins/eventloop-llm/recipes/{name}.yaml" in text.splitlines()[0]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with a tiny model, a tokenizer and data."""
    folder = tmp_path_factory.mktemp("chats")
    runpy.run_path(str(FOLDER / "examples" / "chats.py"))["prepare"](folder)
    return folder


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LEARNT)
def test_a_recipe_trains_and_goes_on(name, chats, tmp_path, monkeypatch, capsys):
    """As its first line says, from the root of a clone; once more it finds nothing left to do."""
    copy = tmp_path / "plugins" / "eventloop-llm"
    shutil.copytree(FOLDER / "recipes", copy / "recipes")
    (tmp_path / "chats").symlink_to(chats)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    recipe = copy / "recipes" / f"{name}.yaml"
    command = (
        recipe.read_text(encoding="utf-8").splitlines()[0].removeprefix("# eventloop ").split()
    )
    asked = [*command, "--device", "cpu", "-p", "jsonl"]

    assert main(asked) == 0, capsys.readouterr().err
    assert main(asked) == 0, capsys.readouterr().err

    what, is_less, bound = LEARNT[name]
    (log,) = (tmp_path / "runs" / name).glob("*.jsonl")
    rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    values = [row["value"] for row in rows if row["name"] == what]
    assert (values[-1] < bound) == (is_less == "<"), values
