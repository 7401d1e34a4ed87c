"""The page "Coming from Composer" names each argument, each event, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

from composer.core import Event
from composer_cases import CASES

from eventloop_composer.arguments import DEFAULTS, REFUSED

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/coming-from-composer.md").read_text()


def rows(heading):
    """Returns the rows of a section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def named(cell):
    return re.findall(r"`(\w+)`", cell)


def test_every_argument_has_a_row():
    """Who has one in a script finds it."""
    found = [name for row in rows("The Trainer's arguments") for name in named(row[0])]

    assert sorted(found) == sorted(DEFAULTS)


def test_what_is_refused_is_called_refused():
    """The page and the code say the same of each."""
    refused = {
        name
        for row in rows("The Trainer's arguments")
        if row[1].startswith("refused")
        for name in named(row[0])
    }

    assert refused == REFUSED.keys()


def test_every_event_has_a_row():
    """So have those that aren't fired."""
    found = [name for row in rows("Events") for name in named(row[0])]

    assert sorted(found) == sorted(one.name for one in Event)


def test_the_readme_has_a_row_for_every_algorithm():
    """28 of them, each with what the tests found."""
    readme = (ROOT / "plugins/eventloop-composer/README.md").read_text()

    found = re.findall(r"^\| (\w+) \| .+ \| equal \|$", readme, re.MULTILINE)

    assert sorted(found) == sorted(CASES)
    assert len(found) == 28
