"""The examples: each keeps the laws of its loss, or declares which it doesn't keep."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from eventloop_check.check_loss import run
from eventloop_check.check_loss.check_loss_command import DECLARATION

EXAMPLES = Path(__file__).parents[4] / "examples"
# Options with which an example is small.
TINY = {
    "charlm": {"width": 32, "depth": 1, "context": 16, "num_files": 17, "batch_size": 4},
    "digits": {"width": 4, "batch_size": 4},
    "finetune": {"width": 4},
    "gan": {"width": 4, "batch_size": 4},
    "glyphs": {"width": 4, "num_train": 52, "num_test": 26},
    "graph": {"num_people": 60},
    "hf_text": {"width": 32, "depth": 1, "max_lines": 20, "batch_size": 4},
    "losses": {"width": 8},
    "ppo": {"num_carts": 2, "num_steps": 4},
    "reinforce": {"num_walkers": 8},
    "tbptt": {"width": 4, "piece": 32},
}
DECLARED = {
    "digits": {"microbatches", "ranks"},
    "finetune": {"microbatches", "ranks"},
    "gan": {"draws"},
    "glyphs": {"microbatches", "ranks"},
    "ppo": {"draws"},
    "reinforce": {"draws"},
}


@pytest.fixture
def example():
    """Imports an example, which is forgotten afterwards."""
    names = []

    def example(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield example
    for name in names:
        del sys.modules[name]


def test_every_example_is_checked():
    """One that is added is checked the day it is added."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TINY.keys()


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", TINY)
def test_an_example_keeps_all_laws_but_those_that_it_declares(name, example, checked):
    """And each that it declares is broken, so that none is declared for nothing."""
    module = example(name)
    declared = getattr(module, DECLARATION, {})

    report = checked(functools.partial(module.task, **TINY[name]), declared).found

    assert declared.keys() == DECLARED.get(name, set())
    assert {row.variant.law for row in report.rows if row.result == "declared"} == declared.keys()
    assert report.unneeded == []
    assert report.succeeds


@pytest.mark.nightly
@pytest.mark.parametrize("name", TINY)
def test_the_command_succeeds_for_an_example(name, monkeypatch, capsys):
    """In processes of its own, with the declarations that it reads from the file."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = [f"--task.{option}={value}" for option, value in TINY[name].items()]

    status = run([f"examples/{name}.py", "--device=cpu", "--json", *options])

    content = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {row["law"] for row in content["rows"] if row["result"] == "declared"} == DECLARED.get(
        name, set()
    )
