"""The toolbox: its names, and what importing them costs."""

from __future__ import annotations

import re

import pytest

from eventloop import toolbox


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
