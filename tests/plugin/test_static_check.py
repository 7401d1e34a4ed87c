"""What a plugin's files show without running them."""

from __future__ import annotations

import pytest

from eventloop.config.configuration import Configuration
from eventloop.plugin.assemble import assemble
from eventloop.plugin.static_check import static_check

SLEEPS = """
from typing import ClassVar

from eventloop import hookimpl

class Plugin:
    wakes_with{tuple_} = ("teacher", "layers")
    off_until_named{bool_} = True

    def __init__(self, *, teacher="", layers=1): ...

    @hookimpl
    def batch_end(self, state): ...
"""
ANNOTATED = {"tuple_": ": ClassVar[tuple[str, ...]]", "bool_": ": ClassVar[bool]"}


@pytest.mark.parametrize("types", [{"tuple_": "", "bool_": ""}, ANNOTATED])
def test_what_a_plugin_waits_for_is_read_with_and_without_types(install, types):
    """Or the list of plugins would show one as active that is off in the run."""
    install("sleeps", SLEEPS.format(**types))

    report = static_check(assemble(Configuration.read({})).find("sleeps").found)

    assert (report.wakes_with, report.off_until_named) == (("teacher", "layers"), True)
