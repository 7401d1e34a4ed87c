"""The line with the bar at any width."""

import io

import pytest
from rich.console import Console

from eventloop_progress.bar import BAR, Field, Line, fitting

FIELDS = [
    Field("epoch 3/10", 7),
    Field("batch 12/45", 6),
    Field("sample 1/2", 1),
    BAR,
    Field("loss 0.4120", 5),
    Field("1,234 samples/s", 2),
    Field("0:12 left", 4),
]


def drawn(width, fields=FIELDS, frac=0.5):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    line = Line()
    line.fields, line.frac = fields, frac
    console.print(line)
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", range(1, 130))
def test_the_line_is_one_line_at_any_width(width):
    """A second line would stay on the terminal each time the bar is drawn."""
    lines = drawn(width)

    assert len(lines) == 1
    assert len(lines[0].rstrip()) <= width


def test_what_matters_least_is_left_out_first():
    """On a narrow terminal epoch, batch and loss say more than a bar."""
    texts = {width: [field.text.strip() for field in fitting(FIELDS, width)] for width in (40, 60)}

    assert texts[40] == ["epoch 3/10", "batch 12/45", "loss 0.4120"]
    assert texts[60] == ["epoch 3/10", "batch 12/45", "", "loss 0.4120", "0:12 left"]


def test_fields_without_text_take_no_room():
    """The loss of the first batches isn't there yet."""
    (line,) = drawn(80, [Field("epoch 1", 7), Field("", 5), Field("0:12 left", 4)])

    assert line.rstrip() == "epoch 1  0:12 left"


def test_the_bar_grows_with_the_run():
    """Half a bar is half a run."""
    lengths = [drawn(120, frac=frac)[0].count("\u2501") for frac in (0.0, 0.5, 1.0)]

    assert lengths == [0, 20, 40]
