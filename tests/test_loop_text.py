"""`loop.py` is the pseudo-code of `docs/explanation/design.md`, line by line."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventloop import loop
from eventloop.data.feed import Feeds
from eventloop.loop import Loop
from eventloop.plugin.declared_hooks import HOOKS

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "design.md"
# Called at any time; and what an earlier fit that raised has left is no part of the pseudo-code.
ANYWHERE = {"log", "exception", "close", "checkpoint_saved"}
SKIPPED = {
    "_start_clean",
    "_continue_after_epoch",
    "_continue_batch",
    "deliver_everything",
    "update",
    "_repeat",
}
# What a call runs, where the name is a parameter or belongs to another class.
RUNS: dict[str, Callable[..., object]] = {
    "train_batch": Loop.train_batch,
    "accumulate": Loop._microbatches,
    "passes": loop.forward_and_loss,
    "of_epoch": Feeds.of_epoch,
}
SECTIONS = {"trainer.fit()": Loop.fit, "<evaluate>": Loop.evaluate, "<predict>": Loop.predict}


def hooks_in_source(function: Callable[..., object]) -> Iterator[str]:
    """Yields the hooks that a function names, in the order in which it comes to them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    yield from _hooks(tree.body[0].body)


def _hooks(nodes: object) -> Iterator[str]:
    if isinstance(nodes, list):
        for one in nodes:
            yield from _hooks(one)
    elif isinstance(nodes, ast.Call) and isinstance(nodes.func, ast.Attribute | ast.Name):
        name = nodes.func.attr if isinstance(nodes.func, ast.Attribute) else nodes.func.id
        yield from _hooks(nodes.func)
        yield from _hooks(nodes.args)
        is_own = ast.unparse(nodes.func) == f"self.{name}" and name not in SKIPPED
        called = RUNS.get(name) or (getattr(Loop, name, None) if is_own else None)
        if inspect.isfunction(called):
            yield from hooks_in_source(called)
    elif isinstance(nodes, ast.Attribute):
        if nodes.attr in HOOKS and ast.unparse(nodes.value).rpartition(".")[2].endswith("hooks"):
            yield nodes.attr
    elif isinstance(nodes, ast.AST) and not isinstance(nodes, ast.FunctionDef | ast.Lambda):
        yield from _hooks([*ast.iter_child_nodes(nodes)])


def hooks_in_text(text: str, heading: str) -> Iterator[str]:
    """Yields the hooks of a section of the pseudo-code; a line asks before it acts."""
    section = re.search(rf"^{re.escape(heading)}.*\n((?:(?: .*)?\n)*)", text, re.MULTILINE)[1]
    for line in section.splitlines():
        words = re.split(r" {2,}", line.strip())[0]
        questions = re.findall(r"\bshould_\w+", words)
        named = re.findall(r"<(\w+)>", words) or ([words] if words in HOOKS else [])
        yield from (*questions, *named)


@pytest.fixture(scope="module")
def text():
    return re.search(r"## The loop\n.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_loop_is_its_pseudo_code(text, heading):
    """Opened side by side, a reader finds every line of the one in the other, in order."""
    in_source = [one for one in hooks_in_source(SECTIONS[heading]) if one not in ANYWHERE]

    assert in_source == list(hooks_in_text(text, heading))


def test_two_lines_that_change_places_are_found(text):
    """The comparison is of the order, too."""
    swapped = text.replace("before_backward\n", "@\n").replace(
        "after_backward\n", "before_backward\n"
    )

    assert list(hooks_in_text(swapped.replace("@", "after_backward"), "trainer.fit()")) != list(
        hooks_in_text(text, "trainer.fit()")
    )
