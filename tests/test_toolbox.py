"""The toolbox: its names, and what importing them costs."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from eventloop import TaskError, toolbox


@pytest.mark.parametrize("name", toolbox.__all__)
def test_every_name_is_there(name):
    """It comes from another module when it is asked for; one that moved would be missed only then."""
    documented = re.findall(r"^    (\w+): ", toolbox.__doc__, re.MULTILINE)

    assert getattr(toolbox, name).__doc__
    assert (name in documented) == (getattr(getattr(toolbox, name), "__name__", "") != name)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` and typing tools rely on it."""
    with pytest.raises(AttributeError, match="replace_flie"):
        _ = toolbox.replace_flie


def test_files_and_messages_come_without_torch(run_python):
    """A command that needs no task starts at once."""
    done = run_python(
        "import sys\n"
        "from eventloop.toolbox import UNITS, RunFolder, closest, replace_file, switch_off\n"
        "print({'torch', 'numpy', 'torchmetrics', 'jsonargparse'} & {*sys.modules})"
    )

    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_paths_are_texts_as_well(tmp_path, make_trainer):
    """A path from a command line or a file of options is a text."""
    weights = make_trainer().export(tmp_path / "model.safetensors")
    (tmp_path / "module.py").write_text("VALUE = 1")
    folder = str(tmp_path / "checkpoint")

    toolbox.write_checkpoint(folder, {"part": {"x": torch.ones(1)}}, {})
    toolbox.replace_file(str(tmp_path / "text"), b"text")

    assert toolbox.weights_at(str(weights)).keys() == {"weight", "bias"}
    assert toolbox.saved_weights_at(str(weights)).keys() == {"weight", "bias"}
    assert toolbox.read_checkpoint(folder).parts["part"]["x"] == 1
    assert toolbox.RunFolder(str(tmp_path)).read("text", 9) == b"text"
    assert toolbox.why_no_file(str(tmp_path)) == "it is a folder"
    assert toolbox.module_of_file("a_module_test", str(tmp_path / "module.py")).VALUE == 1
    assert toolbox.spec_of_file("a_spec_test", str(tmp_path / "module.py")).name == "a_spec_test"


@pytest.mark.parametrize("name", toolbox.__all__)
def test_no_function_takes_a_path_alone(name):
    """The next one that takes a path takes a text, too."""
    function = getattr(toolbox, name)
    if not inspect.isroutine(function):
        return
    annotations = [str(one.annotation) for one in inspect.signature(function).parameters.values()]

    assert not [one for one in annotations if re.search(r"\bPath\b", one) and "str" not in one]


@pytest.mark.parametrize("path", ["nothing.safetensors", "no/folder/of/weights"])
def test_a_text_that_names_nothing_is_an_error_that_names_it(path, clean):
    """And not one of an attribute that a text lacks."""
    with pytest.raises(TaskError, match=path):
        toolbox.weights_at(path)
