"""From TASK to a task."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventloop.cli.task_file import load_task_file
from eventloop.config.option_types import Value
from eventloop.errors import SettingError, TaskError, TaskFileError
from eventloop.task import Task

HOOKS = """
import torch
from eventloop import hookimpl

@hookimpl
def build_model(state):
    return torch.nn.Linear(1, 1)
"""
OBJECT = "import torch\nfrom eventloop import Task\ntask = Task(model=torch.nn.Linear(1, 1))\n"


def test_a_function_is_called_with_the_options_that_were_set(tiny):
    """Its parameters are the task's options, typed and documented."""
    task_file = load_task_file("tiny.py")

    task = task_file.build({"lr": Value("0.5", "flag")})

    assert {name: option.type for name, option in task_file.options.items()} == {
        "lr": float,
        "hidden_size": int,
    }
    assert task_file.options["lr"].doc == "the learning rate, 100% of it."
    assert isinstance(task, Task)
    assert task.name == "tiny"


def test_a_task_object_is_the_task(clean):
    """The shortest task file has no function."""
    (clean / "object_task.py").write_text(OBJECT)

    assert isinstance(load_task_file("object_task.py").build({}), Task)


def test_a_module_with_hooks_is_the_task(clean):
    """Whoever outgrows `Task` writes hooks."""
    (clean / "hooks_task.py").write_text(HOOKS)

    assert load_task_file("hooks_task.py").build({}).__name__ == "hooks_task"


def test_a_dotted_module_is_found_from_the_working_directory(clean):
    """As `python -m` finds it."""
    (clean / "pkg_of_tasks").mkdir()
    (clean / "pkg_of_tasks" / "first.py").write_text(OBJECT)

    assert isinstance(load_task_file("pkg_of_tasks.first").build({}), Task)


def test_the_file_imports_its_neighbours(clean):
    """As `python file.py` lets it."""
    (clean / "deep").mkdir()
    (clean / "deep" / "neighbour.py").write_text(OBJECT)
    (clean / "deep" / "main_task.py").write_text("from neighbour import task\n")

    assert isinstance(load_task_file("deep/main_task.py").build({}), Task)


def test_a_file_never_takes_the_name_of_a_module_that_is_in_use(clean):
    """A task file may be called eventloop.py or json.py."""
    (clean / "json.py").write_text(OBJECT)
    before = sys.modules["json"]

    load_task_file("json.py")

    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("tniy.py", "there is no file 'tniy.py'; the closest is 'tiny.py'"),
        ("tniy", "there is no module 'tniy'; the closest is 'tiny.py'"),
        ("nowhere/tiny.py", "which doesn't exist"),
        ("no.such.module", "there is no module"),
        (
            ".",
            ". is a folder\n  files  tiny.py\n  fix    name the file with the task: `eventloop fit tiny.py`",
        ),
        ("./", "./ is a folder"),
        ("..", ".. is a folder\n  files  none that ends in .py"),
        ("pyproject.toml", "is not a Python file"),
        ("./pyproject.toml", "is not a Python file"),
    ],
)
def test_a_task_that_does_not_exist_is_refused_with_the_closest(tiny, label, message):
    """A misspelt path is the most common mistake."""
    with pytest.raises(TaskFileError) as caught:
        load_task_file(label)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "holds no task: no Task and no hook implementations"),
        ("def tsk(): pass", "the closest is 'tsk'"),
        ("task = 4", "`task` there is 4"),
        (HOOKS.replace("build_model", "build_modle"), "the closest is 'build_model'"),
        (HOOKS.replace("build_model", "forward"), "it implements forward, but not build_model"),
    ],
)
def test_a_file_without_a_task_is_refused(clean, code, message):
    """The message says what was looked for and what was found."""
    (clean / "empty_task.py").write_text(code)

    with pytest.raises(TaskFileError) as caught:
        load_task_file("empty_task.py")

    assert message in str(caught.value)
    assert "def task(): return Task(...)" in str(caught.value)


def test_a_package_names_its_modules_with_tasks(clean):
    """The modules aren't imported: the first one, which has no task, would fail."""
    folder = Path("manytasks")
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Tasks."""\n')
    (folder / "a.py").write_text("raise ImportError\n")
    (folder / "b.py").write_text("def task(): ...\n")
    (folder / "c.py").write_text("from b import task as other\ntask = other\n")
    (folder / "broken.py").write_text("def task(:\n")

    with pytest.raises(TaskFileError) as caught:
        load_task_file("manytasks")

    message = str(caught.value)
    assert "manytasks is a package without a task of its own" in message
    assert "manytasks.b, manytasks.c" in message
    assert "eventloop fit manytasks.b" in message


def test_a_function_that_returns_no_task_is_refused(clean):
    """A forgotten `return` is the most common case."""
    (clean / "none_task.py").write_text("def task(): pass")

    with pytest.raises(TaskFileError, match=r"task\(\) returns None, which isn't a task"):
        load_task_file("none_task.py").build({})


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("\nimport nosuch", ["ModuleNotFoundError", "bad_task.py, line 2, in <module>"]),
        ("\n\ndef task(:", ["SyntaxError", "bad_task.py, line 3"]),
        ("def task():\n    return 1 / 0", ["ZeroDivisionError", "bad_task.py, line 2, in task"]),
        ("import sys; sys.exit(1)", ["SystemExit: 1", "bad_task.py, line 1"]),
        ("import json\ntask = json.loads('{')", ["JSONDecodeError", "bad_task.py, line 2"]),
        (
            "from torch.utils.data import DataLoader\ntask = DataLoader([], shuffle=True)",
            [
                "ValueError",
                "bad_task.py, line 2",
                "a data set with samples: it has none to shuffle",
            ],
        ),
        ("from . import data", ["ImportError", "write `import helpers` for a file in its folder"]),
    ],
)
def test_a_task_that_raises_is_told_with_file_and_line(clean, code, parts):
    """The place in the user's own file comes first, and none of our frames are shown."""
    (clean / "bad_task.py").write_text(code)

    with pytest.raises(TaskError) as caught:
        load_task_file("bad_task.py").build({})

    text = str(caught.value)
    assert text.startswith("bad_task.py raises")
    assert all(part in text for part in parts)
    assert "task_file.py" not in text
    assert "importlib" not in text


def test_options_of_the_task_are_checked(tiny):
    """Unknown, of the wrong type, or missing."""
    (tiny / "needy.py").write_text("def task(*, data: str): pass")
    task_file = load_task_file("tiny.py")

    with pytest.raises(SettingError, match="'lrr'; the closest is 'lr'"):
        task_file.typed_options({"lrr": Value("1", "flag")})
    with pytest.raises(SettingError, match=r"task\.lr: 'x' isn't of type float"):
        task_file.typed_options({"lr": Value("x", "flag")})
    with pytest.raises(SettingError, match=r"`--task\.data STR`"):
        load_task_file("needy.py").typed_options({})
