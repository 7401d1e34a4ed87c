"""Shadows: several versions of one distribution on `sys.path`, of which one hides the others."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

from eventloop.errors import PluginError
from eventloop.plugin.metadata import canonical, name_and_version
from eventloop.shell import pip

if TYPE_CHECKING:
    from eventloop.plugin.records import Selected


def shadowed(selected: Iterable[Selected]) -> Iterator[PluginError]:
    """Finds active plugins whose distribution is there in more than one version.

    Which of the two is described and which is imported need not be the same: a leftover of an old
    installation, or a folder on PYTHONPATH.
    """
    active: dict[str, list[Selected]] = {}
    for one in selected:
        if one.status == "active" and one.found.distribution:
            active.setdefault(one.found.distribution, []).append(one)
    repeated = _repeated()
    for distribution, group in active.items():
        if canonical(distribution) not in repeated:
            continue
        there = importlib_metadata.distributions(name=distribution)
        places = {
            name_and_version(one)[1] or "none": str(one.locate_file(""))
            for one in reversed([*there])
        }
        if len(places) > 1:
            listed = [f"{version} in {place}" for version, place in reversed(places.items())]
            yield PluginError(
                f"{distribution} is installed in {len(places)} versions, of which one hides the "
                f"others: {', '.join(listed)}",
                plugin=", ".join(one.found.origin for one in group),
                fix=f"{pip('uninstall', distribution)} until none is left, and install it once",
            )


def _repeated() -> set[str]:
    """Gives the distributions that are there more than once; to read their metadata takes longer."""
    names: list[str] = []
    for folder in dict.fromkeys(os.path.realpath(one) for one in sys.path):
        try:
            entries = [one.name for one in Path(folder).iterdir()]
        except OSError:  # no folder
            continue
        infos = (one for one in entries if one.endswith((".dist-info", ".egg-info")))
        names += [canonical(one.rpartition(".")[0].partition("-")[0]) for one in infos]
    return {name for name, count in Counter(names).items() if count > 1}
