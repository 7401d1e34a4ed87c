"""A module is its file as it stands."""

from importlib.util import module_from_spec

import pytest

from eventloop.plugin.load import spec_of_file


def value_of(path):
    spec = spec_of_file("of_a_file", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VALUE


def test_an_edit_within_a_second_is_seen(tmp_path):
    """A script that trains with one digit after the other writes files of one size and second."""
    path = tmp_path / "task.py"

    values = []
    for value in range(5):
        path.write_text(f"VALUE = {value}\n")
        values.append(value_of(path))

    assert values == [0, 1, 2, 3, 4]
    assert [one.name for one in tmp_path.iterdir()] == ["task.py"]


def test_a_mistake_is_told_with_its_place(tmp_path):
    """As Python tells it."""
    path = tmp_path / "task.py"
    path.write_text("VALUE = 1 +\n")

    with pytest.raises(SyntaxError) as caught:
        value_of(path)

    assert (caught.value.filename, caught.value.lineno) == (str(path), 1)
