"""What stands on the page, and that nothing in it can do harm."""

import shutil
import subprocess
from html.parser import HTMLParser

import numpy
import pytest
from matplotlib.image import imread

from eventloop_report import Page, Series, Table
from eventloop_report.figures import COLOURS, MAX_LINES, Drawing, Plot, file_names, plots_of
from eventloop_report.page import number

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><h1>",
    "a\x1b[31m\x00\nb\u202egnp",
    "$\\frac{1}{$",
    "_hidden",
    "../../etc/passwd",
    "\u6f22\u5b57 \ud800",
    "x" * 5000,
    "",
]


class Parsed(HTMLParser):
    """Reads a page: its elements, their attributes and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def series(*values):
    one = Series()
    for batch, value in enumerate(values, 1):
        one.add(batch, value)
    return one


def plot(*names):
    return Plot("loss", {name: [(1, 2.0), (2, 1.0)] for name in names})


def page(**given):
    return Page("run", "finished", **given).html()


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_any_name_is_shown_and_does_nothing(name):
    """Names come from tasks, plugins and data; whoever opens the page of a stranger's run is safe."""
    drawn = Drawing(Plot(name, {name: [(1, 2.0)], "other": [(1, 1.0)]})).svg()
    tables = [Table(name, [(name, 1.5)], (name, name), name), Table(name, [(name, name)])]
    text = Page(name, name, plots={name: drawn}, tables=tables, note=name).html()

    text.encode("utf-8")
    parsed = Parsed(text)
    assert not {"script", "img", "iframe", "object", "link", "a"} & set(parsed.elements)
    assert (
        parsed.elements.count("h1") == parsed.elements.count("title") - drawn.count("<title") == 1
    )
    assert not any(key.startswith("on") or key in ("src", "style!") for key, _ in parsed.attributes)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_needs_nothing_else():
    """No network, no second file: it can be mailed, and opened in ten years."""
    parsed = Parsed(page(plots={"loss": Drawing(plot("train", "test")).svg()}))

    links = [value for key, value in parsed.attributes if key in ("href", "xlink:href", "src")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "url(http" not in page(plots={"loss": Drawing(plot("train")).svg()})


def test_plots_take_the_colour_of_the_text_around_them():
    """Dark text on a dark page couldn't be read."""
    drawn = Drawing(plot("train", "test")).svg()

    assert "currentColor" in drawn
    assert "#000000" not in drawn
    assert all(colour in drawn for colour in COLOURS[:2])


def test_a_drawing_is_the_same_each_time():
    """So that pages of equal runs can be compared."""
    assert Drawing(plot("train")).svg() == Drawing(plot("train")).svg()
    assert Drawing(plot("train")).png().startswith(b"\x89PNG")


def test_numbers_that_belong_together_share_a_plot():
    """Loss of training and evaluation, a metric of each eval set, the rate of each optimizer."""
    names = ["train/loss", "train/loss.D", "test/loss", "lr/sgd", "lr/adam", "train/accuracy",
             "test/accuracy", "valid/accuracy", "train/grad_norm", "ema/decay",
             "a/b/f1", "odd"]  # fmt: skip

    plots = plots_of({name: series(1.0) for name in names}, ["test", "valid", "a", "a/b"])

    assert {one.title: list(one.lines) for one in plots} == {
        "loss": ["train", "train.D", "test"],
        "learning rate": ["sgd", "adam"],
        "accuracy": ["train", "test", "valid"],
        "f1": ["a/b"],
        "train/grad_norm": ["train"],
        "ema/decay": ["ema/decay"],
        "odd": ["odd"],
    }
    assert [one.title for one in plots][:2] == ["loss", "learning rate"]


def test_files_of_plots_have_harmless_names():
    """A title is not a path, and two titles are two files."""
    titles = [*HOSTILE, "a/b", "a b", "A-B"]

    names = file_names([Plot(title, {}) for title in titles])

    assert len(set(names)) == len(titles)
    assert all(name and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)


def test_more_lines_than_can_be_told_apart_are_not_drawn():
    """Colours and dashes are used up; the title says so, and long names leave the lines room."""
    drawn = Drawing(Plot("loss", {f"{idx} {'x' * 100}": [(1, 1.0)] for idx in range(29)})).svg()

    assert drawn.count("...<") == MAX_LINES == 12
    assert ">loss (12 of 29 lines)<" in drawn


def test_values_of_any_size_are_drawn():
    """A loss that explodes is what the page is opened for."""
    values = [1e-300, 1e99, -1e99, 1e308, -1e308, float("nan"), float("inf"), 0.0]

    (one,) = plots_of({"train/loss": series(*values)}, [])

    assert "currentColor" in Drawing(one).svg()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12345, "12,345"), (1234.56, "1,234.6"), (1e-7, "1e-07"), (1e12, "1e+12"),
     (float("nan"), "nan"), (float("-inf"), "-inf")],
)  # fmt: skip
def test_numbers_have_the_digits_that_count(value, text):
    """Sixteen digits can't be compared at a glance."""
    assert number(value) == text


def screenshot(text, folder, browser):
    (folder / "page.html").write_text(text, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
             "--window-size=1000,900", f"--screenshot={folder}/shot.png"]  # fmt: skip
    subprocess.run(
        [browser, *flags, (folder / "page.html").as_uri()],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    return imread(folder / "shot.png")


def num_pixels(picture, colour):
    wanted = [int(colour[idx : idx + 2], 16) / 255 for idx in (1, 3, 5)]
    return int((numpy.abs(picture[..., :3] - wanted).max(-1) < 0.02).sum())


def test_a_browser_draws_the_plots(tmp_path):
    """Where there is one: the lines have their colours, and control: without plots nothing has."""
    browsers = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    lines = {name: [(batch, slope * batch) for batch in range(50)] for name, slope in (("a", 1), ("b", 2))}  # fmt: skip
    for browser in list(browsers)[:1]:
        drawn = screenshot(
            page(plots={"loss": Drawing(Plot("loss", lines)).svg()}), tmp_path, browser
        )
        empty = screenshot(page(), tmp_path, browser)

        assert all(num_pixels(drawn, colour) > 200 for colour in COLOURS[:2])
        assert all(num_pixels(empty, colour) == 0 for colour in COLOURS[:2])


def test_the_names_of_a_table_are_not_broken_inside_words():
    """Beside a long path, a column whose words may break anywhere shrinks to single letters."""
    page = Page("run", "done", tables=[Table("Settings", [["max_duration", "a/" * 200]])])

    assert "td:first-child, th { overflow-wrap: normal }" in page.html()


def test_the_axis_of_batches_has_whole_numbers():
    """A run of one epoch has one point, and there is no batch 0.96."""
    drawn = Drawing(Plot("loss", {"train": [(1, 0.5)]})).svg()

    assert ">1</text>" in drawn
    assert "0.96" not in drawn
