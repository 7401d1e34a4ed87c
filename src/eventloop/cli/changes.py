"""`--allow-...`: what may differ from the run that is resumed."""

from __future__ import annotations

from eventloop.cli.arguments import Arguments, CommandOption
from eventloop.run.start import Allowed

CHANGES = (
    CommandOption("allow-config-change", "", "resume though settings, options or task differ"),
    CommandOption("allow-plugin-change", "NAMES", "resume with other versions of these algorithms"),
    CommandOption(
        "allow-missing-plugin", "NAMES", "resume without these algorithms; keep their state"
    ),
)


def allowed(arguments: Arguments) -> Allowed:
    """Reads what may differ; several names are separated by commas."""
    given = arguments.given
    return Allowed(
        config_change="allow_config_change" in given,
        plugin_change=_names(given.get("allow_plugin_change", "")),
        missing_plugin=_names(given.get("allow_missing_plugin", "")),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))
