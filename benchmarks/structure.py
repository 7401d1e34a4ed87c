"""Structure: how large the core is, which way its imports point, and what a run asks how often.

    python benchmarks/structure.py [--json] [--src src]

The first part reads files: `src` may be that of another checkout, for a comparison. What type
checkers alone import doesn't count. The second part runs the `eventloop` that this Python imports:

- Python calls, and files with code that ran, of building a `Trainer`, of one batch, and of saving
  one checkpoint of `Linear(3, 3)`, each the second time, so that no import is counted;
- from `Trainer(...)` to the first batch: the files that calls enter, and how often they return to
  one that they have been in; of all calls, and of those that are handed the settings, as keywords,
  as a `Configuration` or as `Settings`;
- how often one `eventloop fit` discovers, chooses, imports and builds plugins, and seeds, without a lock and
  with one.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

# The functions that stand for a question, whatever a version calls its files.
QUESTIONS = {
    "discoveries": "discover",
    "choices": "choose",
    "imports": "imported",
    "builds": "build",
    "seedings": "seed_everything",
}
_TASK = """
import torch
from eventloop import Task

def task():
    data = [(torch.zeros(2, 3), torch.zeros(2, 3))] * 2
    return Task(
        model=torch.nn.Linear(3, 3),
        train_dataloader=data,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
    )
"""


def read(source: Path) -> dict[str, Any]:
    """Measures the files of a package.

    Args:
        source: the folder that holds `eventloop/`.
    """
    package = source / "eventloop"
    modules = {_module(path, source): path for path in sorted(package.rglob("*.py"))}
    edges = [
        (name, imported)
        for name, path in modules.items()
        for imported in _imports(ast.parse(path.read_text()), modules)
        if imported != name
    ]
    folders = {(_folder(one), _folder(other)) for one, other in edges}
    circles = sorted(
        {tuple(sorted(pair)) for pair in folders if len({*pair, ""}) > 2 and pair[::-1] in folders}
    )
    names = collections.Counter(
        path.name for path in modules.values() if path.name != "__init__.py"
    )
    lines = [_code_lines(path) for path in modules.values()]
    return {
        "files": len(modules),
        "lines": sum(len(path.read_text().splitlines()) for path in modules.values()),
        "code lines": sum(lines),
        "modules at the root": sum(path.parent == package for path in modules.values()),
        "internal imports": len(edges),
        "circles of folders": [" and ".join(pair) for pair in circles],
        "names used twice": sorted(name for name, count in names.items() if count > 1),
    }


def _module(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder(module: str) -> str:
    """Returns the folder below the package that a module stands in; at the root, the module."""
    return f"{module}.".split(".")[1]


def _imports(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Yields what of the package is imported when the code runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and str(node.module) in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)
        else:
            yield from _imports(node, modules)


def _code_lines(path: Path) -> int:
    """Counts lines that hold code: neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose
        for number, line in enumerate(text.splitlines(), 1)
    )


class Calls:
    """Counts the calls of Python functions while it is entered.

    Args:
        package: the folder whose files are counted.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self.num = 0
        self.files: set[str] = set()
        self.by_name: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._package):
            self.num += 1
            self.files.add(frame.f_code.co_filename)
            self.by_name[frame.f_code.co_name] += 1


class FirstBatchError(Exception):
    """Ends what is measured."""


class Route:
    """Follows calls from file to file, until the first batch begins.

    Args:
        package: the folder whose files are counted.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self.all: list[str] = []
        self.settings: list[str] = []

    def __enter__(self) -> Route:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package):
            return
        self._enter(self.all, code.co_filename)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]
        if any(_has_settings(frame.f_locals.get(name)) for name in names):
            self._enter(self.settings, code.co_filename)

    @staticmethod
    def _enter(visited: list[str], file: str) -> None:
        if not visited or visited[-1] != file:
            visited.append(file)


def _has_settings(value: object) -> bool:
    if isinstance(value, dict):
        return "max_duration" in value
    return type(value).__name__ in ("Settings", "Configuration")


def run() -> dict[str, Any]:
    """Measures what runs: a trainer, a batch, a checkpoint, a command."""
    import torch

    import eventloop
    from eventloop import Task, Trainer

    package = Path(eventloop.__file__).parent

    def trainer(**settings: Any) -> Trainer:
        task = Task(
            model=torch.nn.Linear(3, 3),
            train_dataloader=[(torch.zeros(2, 3), torch.zeros(2, 3))] * 10,
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        )
        return Trainer(task, autoload=False, device="cpu", **settings)

    def counted(function: Callable[[], Any]) -> Calls:
        with Calls(package) as calls:
            function()
        return calls

    def fit(num_batches: int, **settings: Any) -> Calls:
        with trainer(max_duration=f"{num_batches}ba", **settings) as made:
            return counted(made.fit)

    def saving(folder: str, name: str) -> Calls:
        one = Path(folder, name)
        return fit(2, run_dir=str(one), checkpoint_interval="1ba")

    fit(2)
    built = counted(lambda: trainer(max_duration="1ba").close())
    batch = (fit(8).num - fit(4).num) / 4
    with tempfile.TemporaryDirectory() as folder:
        saving(folder, "first")
        saved = saving(folder, "second")
        idle = fit(2, run_dir=str(Path(folder, "third")))
    unsaved = fit(2).files
    route = _route(package, trainer)
    asked, locked = _command(package), _command(package, is_locked=True)
    return {
        "Trainer(): calls": built.num,
        "Trainer(): files": len(built.files),
        "a batch: calls": batch,
        "a checkpoint: calls": saved.num - idle.num,
        "a checkpoint: files": len(saved.files - unsaved),
        "to the first batch: files": len(set(route.all)),
        "to the first batch: returns": len(route.all) - len(set(route.all)),
        "the path of a setting: files": len(set(route.settings)),
        "the path of a setting: returns": len(route.settings) - len(set(route.settings)),
        **{f"one fit: {name}": asked.by_name[function] for name, function in QUESTIONS.items()},
        **{
            f"one locked fit: {name}": locked.by_name[function]
            for name, function in QUESTIONS.items()
        },
    }


def _route(package: Path, trainer: Callable[..., Any]) -> Route:
    """Follows the calls of a run until its first batch begins."""
    from eventloop import hookimpl

    class Ends:
        name = "ends"

        @hookimpl
        def batch_start(self) -> None:
            sys.setprofile(None)  # what comes of the exception is no part of it
            raise FirstBatchError

    ends = [Ends()]
    with (
        contextlib.suppress(FirstBatchError),
        Route(package) as route,
        trainer(max_duration="1ba", algorithms=ends) as made,
    ):
        made.fit()
    return route


def _command(package: Path, *, is_locked: bool = False) -> Calls:
    """Counts over one `eventloop fit`."""
    from eventloop.cli import main

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(_TASK)
        os.chdir(folder)
        try:
            if is_locked:
                Path("pyproject.toml").touch()
                with contextlib.redirect_stdout(io.StringIO()):
                    main(["plugins", "lock"])
            with Calls(package) as calls, contextlib.redirect_stdout(io.StringIO()):
                main(["fit", "task.py", "--max-duration", "1ep", "--device", "cpu"])
        finally:
            os.chdir(before)
    return calls


def main_() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = read(arguments.src) | run()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("what", "how much")
    for name, value in found.items():
        is_list = isinstance(value, list) and value
        table.add_row(name, f"{len(value)}: {', '.join(value)}" if is_list else f"{value or 0:,}")
    Console().print(table)


if __name__ == "__main__":
    main_()
