"""Edits of `[tool.eventloop]`."""

import tomllib

import pytest

from eventloop.cli.pyproject_lists import has_name, with_name, without_name

FILES = {
    "empty": "",
    "no table": '[project]\nname = "mine"  # it is\n',
    "a table": '[tool.eventloop]  # how to train\nseed = 3\n\n[tool.ruff]\nselect = ["E"]\n',
    "an empty list": "[tool.eventloop]\ndisable = [  ]\n",
    "a list": '[tool.eventloop]\ndisable = ["ema"]  # slow\n',
    "a comment first": '[tool.eventloop]\ndisable = [  # for now\n  "ema",\n]\n',
    "lines": "[tool.eventloop]\ndisable = [\n    'ema',  # [slow]\n]\n[tool.eventloop.owners]\nloss = 'task'\n",
    "a subtable alone": '[tool.eventloop.owners]\nloss = "task"',
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_a_name_goes_in_and_out_and_the_rest_stays(text, end):
    """The file is a person's: comments, order and ends of lines are theirs."""
    text = text.replace("\n", end)

    added = with_name(text, "disable", "sam")
    removed = without_name(added, "disable", "SAM")

    assert has_name(added, "disable", "sam")
    assert not has_name(removed, "disable", "sam")
    assert "\n" not in added.replace(end, "") or not text
    assert [one for one in text.split(end) if "disable" not in one and one not in removed] == []
    assert text.count("#") == removed.count("#")


def test_a_name_s_own_comment_goes_with_it():
    """It says why this name was there; those of other names stay."""
    text = "[tool.eventloop]\ndisable = [\n    'ema',  # slow\n    'sam',\n]\n"

    assert without_name(text, "disable", "sam") == text.replace("    'sam',\n", "")
    assert without_name(text, "disable", "ema") == text.replace("    'ema',  # slow\n", "")


def test_versions_belong_to_a_name():
    """`required` holds both."""
    text = '[tool.eventloop]\nrequired = ["ema>=0.2", "sam"]\n'

    assert without_name(text, "required", "ema") == '[tool.eventloop]\nrequired = ["sam"]\n'


ORDERS = {
    "inline": "tool = {eventloop = {seed = 3}}\n",
    "dotted": "[tool]\neventloop.seed = 3\n",
    "apart": '[tool.ruff]\nx = 1\n[project]\nname = "a"\n[tool.eventloop]\nseed = 3\n[build]\ny = 1\n',
    "a byte order mark": "\ufeff[tool.eventloop]\nseed = 3\n",
}


@pytest.mark.parametrize("text", ORDERS.values(), ids=ORDERS)
def test_any_way_to_write_the_table_is_edited(text):
    """What the file says is the same but for the list."""
    before = tomllib.loads(text.removeprefix("\ufeff"))
    edited = with_name(text, "disable", "sam")

    after = tomllib.loads(edited.removeprefix("\ufeff"))
    assert after["tool"]["eventloop"].pop("disable") == ["sam"]
    assert after == before
    assert edited.startswith("\ufeff") == text.startswith("\ufeff")


@pytest.mark.parametrize("text", ["[tool.eventloop]\ndisable = 3\n", "tool = 3\n", "[tool\n"])
def test_what_is_no_list_is_an_error(text):
    """The file is left as it is."""
    with pytest.raises(ValueError, match=r"disable of \[tool.eventloop\]|line 1"):
        with_name(text, "disable", "sam")
