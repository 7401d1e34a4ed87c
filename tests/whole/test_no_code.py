"""Nothing that loads can run code: no pickle, no eval, no YAML objects, anywhere in the packages."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
RULES = {"S102", "S301", "S307", "S506"}  # exec, pickle, eval, yaml.load
RUN_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUN_CODE |= {"jsonpickle"}
CALLS = {"torch.load", "np.load", "numpy.load", "eval", "exec", "__import__"}
CALLS |= {"yaml.load", "yaml.full_load", "yaml.unsafe_load"}
# The one reads what its own forks wrote to it. The bridges pass a word of other frameworks' on: to Composer,
# which writes its own kind of file, and to Lightning, which makes a dict. What ranks have is pickled to be
# compared, not to be read. The command check-loss reads a batch, of whatever classes, that its own process
# wrote to a temporary folder of the command's.
TESTING = "plugins/eventloop-testing/src/eventloop_testing/ranks.py"
ALLOWED = {
    TESTING: ["pickle"],
    "src/eventloop/distributed/data_parallel.py": ["pickle.dumps"],
    "plugins/eventloop-check/src/eventloop_check/check_loss/probe.py": [
        *("torch.load", "weights_only", "torch.load")
    ],
    "plugins/eventloop-composer/src/eventloop_composer/arguments.py": ["weights_only"],
    "plugins/eventloop-composer/src/eventloop_composer/trainer.py": ["weights_only"],
    "plugins/eventloop-lightning/src/eventloop_lightning/checkpoint_state.py": ["weights_only"],
    "plugins/eventloop-lightning/src/eventloop_lightning/lightning_checkpoints.py": ["weights_only"]
    * 2,
}


def reasons(source):
    """Yields what a module does with which a file could run code."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        yield from (name for name in names if name.split(".")[0] in RUN_CODE)
        yield from (name for name in names if name in CALLS)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                yield called
            yield from (
                one.arg for one in node.keywords if one.arg in ("weights_only", "allow_pickle")
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_could_run_what_it_reads(path):
    """`weights_only=False` needs `torch.load`, and nothing here calls it at all."""
    found = list(reasons(path.read_text(encoding="utf-8")))

    assert found == ALLOWED.get(path.relative_to(ROOT).as_posix(), [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from yaml import load",
        "yaml.load(text, yaml.Loader)",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "read(path, weights_only=False)",
        "read(path, allow_pickle=True)",
        "if a:\n    def f():\n        eval(text)",
    ],
)
def test_what_could_is_found(source):
    """The negative control, one for each way."""
    assert list(reasons(source))


def test_ruff_holds_its_rules_over_the_packages():
    """Nowhere switched off, but for the one that reads its own forks."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    off = {
        path
        for path, rules in ruff["per-file-ignores"].items()
        if any(one[0] == "S" for one in rules)
    }
    silenced = [
        path.name
        for path in SOURCES
        if re.search(r"noqa(?!:)|noqa:[^\n]*\bS(102|301|307|506)", path.read_text(encoding="utf-8"))
    ]

    assert set(ruff["select"]) >= RULES
    assert RULES.isdisjoint(ruff["ignore"])
    assert {path for path in off if not path.startswith(("tests", "plugins/*/tests"))} == {TESTING}
    assert silenced == []
