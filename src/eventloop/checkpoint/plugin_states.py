"""What plugins keep in a checkpoint, each under its name with the version that wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eventloop.checkpoint.schema import loading
from eventloop.naming import fold
from eventloop.plugin.plans import BLAME
from eventloop.plugin.records import Plugin
from eventloop.plugin.state_methods import is_per_rank, keeps_state


class PluginStates:
    """The states of the active plugins.

    Args:
        plugins: gives the active plugins; asked at each use, as one may drop out.

    Attributes:
        kept: states of plugins that aren't here, which the next checkpoint holds unchanged.
    """

    def __init__(self, plugins: Callable[[], Iterable[Plugin]]) -> None:
        self._plugins = plugins
        self.kept: dict[str, Any] = {}

    def take(self, *, per_rank: bool) -> dict[str, Any]:
        """Gives the states by folded name.

        Args:
            per_rank: of those plugins that keep one a rank, or of the others.

        Raises:
            BaseException: what a plugin raises, with a note that names it.
        """
        found = {} if per_rank else dict(self.kept)
        for plugin in self._plugins():
            if keeps_state(plugin) and is_per_rank(plugin) is per_rank:
                target: Any = plugin.target
                with _blamed(plugin, "state_dict"):
                    found[fold(plugin.name)] = {
                        "version": plugin.version,
                        "state": target.state_dict(),
                    }
        return found

    def put(self, states: Mapping[str, Any], path: str = "plugins") -> None:
        """Gives each plugin what it kept; one without a state begins anew.

        Args:
            path: of the states in the checkpoint.

        Raises:
            CheckpointError: a plugin can't go on from what is there.
            BaseException: what else a plugin raises, with a note that names it.
        """
        for plugin in self._plugins():
            one = states.get(fold(plugin.name))
            if one is not None and keeps_state(plugin):
                target: Any = plugin.target
                name = f"{path}.{fold(plugin.name)}"
                with _blamed(plugin, "load_state_dict"), loading(name, by=plugin.origin):
                    target.load_state_dict(one["state"], one["version"])


@contextmanager
def _blamed(plugin: Plugin, method: str) -> Iterator[None]:
    """Notes on an exception which plugin raised it, in which of its methods."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{BLAME}{plugin.origin} in {method}\n  fix  {plugin.fix('mend it')}")
        raise
