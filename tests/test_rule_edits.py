"""Edits of `[tool.eventloop]`."""

import tomllib

import pytest

from eventloop.config.rule_edits import has_name, with_name, without_name

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


def test_the_only_name_leaves_its_comment():
    """It may say why, and for how long."""
    text = "[tool.eventloop]\ndisable = [\n    'ema',  # slow\n    'sam',\n]\n"

    assert without_name(text, "disable", "sam") == text.replace("    'sam',\n", "")
    assert "# slow" in without_name(text, "disable", "ema")


def test_versions_belong_to_a_name():
    """`required` holds both."""
    text = '[tool.eventloop]\nrequired = ["ema>=0.2", "sam"]\n'

    assert without_name(text, "required", "ema") == '[tool.eventloop]\nrequired = ["sam"]\n'


@pytest.mark.parametrize(
    "text", ["tool = {eventloop = {seed = 3}}\n", "[tool]\neventloop.seed = 3\n"]
)
def test_what_is_written_otherwise_is_left_alone(text):
    """A wrong guess would break the file of other tools."""
    with pytest.raises(tomllib.TOMLDecodeError):
        with_name(text, "disable", "sam")
