"""Progress in a notebook: what stands below the cell at each moment."""

import re

from eventloop_progress.bar import BAR, Field
from eventloop_progress.notebook import MOST_EVALUATIONS, Notebook


class Cell:
    """The output of a cell: what was shown, each with all that replaced it."""

    def __init__(self):
        self.outputs = []

    def __call__(self, html):
        self.outputs.append([html])
        return self.outputs[-1].append


def test_one_output_is_written_again():
    """A cell that grew with each draw would have thousands of bars after an hour."""
    cell = Cell()
    notebook = Notebook(cell)

    notebook.draw([Field("epoch 1/2", 7), BAR, Field("", 5)], 0.25)
    notebook.results(1, 10, {"test": {"<loss>": 0.5}})
    notebook.note("saved in a&b")
    notebook.draw([Field("epoch 2/2", 7), BAR], 0.5)

    (output,) = cell.outputs
    assert 'value="0.2500"' in output[0]
    last = output[-1]
    assert "epoch 2/2" in last
    assert "epoch 1/2" not in last
    assert "&lt;loss&gt;" in last
    assert "saved in a&amp;b" in last
    assert last.index("<table>") < last.index("<progress") < last.index("saved in")


def test_what_follows_a_fit_is_shown_in_the_cell_of_then():
    """A second fit in another cell doesn't write into the first one's output."""
    cell = Cell()
    notebook = Notebook(cell)

    for _ in range(2):
        notebook.results(1, 10, {"test": {"loss": 0.5}})
        notebook.draw([BAR], 1.0)
        notebook.close(keep=True)

    assert [len(re.findall("<tr><td", output[-1])) for output in cell.outputs] == [1, 1]


def test_an_evaluation_alone_leaves_nothing():
    """Its caller has the results."""
    cell = Cell()
    notebook = Notebook(cell)

    notebook.draw([Field("evaluation", 7), BAR], 0.5)
    notebook.close(keep=False)

    assert "evaluation" not in cell.outputs[0][-1]


def test_a_long_run_shows_its_latest_evaluations():
    """A page of a thousand rows would have to be scrolled to see the bar."""
    cell = Cell()
    notebook = Notebook(cell)

    for batch in range(100):
        notebook.results(1, batch, {"test": {"loss": 0.5}})
    notebook.draw([BAR], 1.0)

    found = re.findall(r"<tr><td[^>]*>1</td><td[^>]*>(\d+)</td>", cell.outputs[0][-1])
    assert found == [str(batch) for batch in range(100 - MOST_EVALUATIONS, 100)]
