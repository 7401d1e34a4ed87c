"""The page's tables about a run, from manifest, clock and trace."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eventloop import Settings
from eventloop_report.page import Table, number
from eventloop_report.series import Series

if TYPE_CHECKING:
    from eventloop import StateView

_MOST_CHARS = 300


def about(state: StateView) -> Iterator[tuple[str, str]]:
    """Yields the facts of the run, as pairs of a name and a text."""
    manifest = state.manifest
    clock = state.clock
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    ranks = f", {state.layout}" if state.world_size > 1 else ""
    yield (
        "done",
        (
            f"{clock.epoch:,} epochs, {clock.batch:,} batches, {clock.sample:,} samples"
            + (f", {clock.token:,} tokens" if clock.token else "")
            + f" in {clock.seconds:,.1f} s"
        ),
    )
    if tested := manifest.get("tested"):
        finite = ((name, value) for name, value in tested["metrics"].items() if value is not None)
        numbers = ", ".join(f"{name} {number(value)}" for name, value in finite)
        yield "test sets", f"{numbers or 'nothing'}, with {_weights(tested['checkpoint'])}"
    yield "folder", str(state.run_dir)
    yield "device", f"{manifest['device']}{ranks}, precision {state.precision.name}"
    yield "versions", versions
    commit = manifest["git"]["commit"]
    if commit:
        yield "commit", commit + (", with changes" if manifest["git"]["dirty"] else "")
    yield "command", _short(shlex.join(manifest["command_line"]))
    yield "settings", _short(", ".join(_changed_settings(manifest["settings"])) or "defaults")
    for plugin in manifest["plugins"]:
        options = ", ".join(f"{name}={value!r}" for name, value in plugin["options"].items())
        version = plugin["version"] or plugin["source"]
        yield (
            plugin["role"],
            _short(f"{plugin['name']} {version}{f' ({options})' if options else ''}"),
        )
    for plugin in manifest["off"]:
        yield "off", _short(f"{plugin['name']}: {plugin['reason']}")


def results(numbers: Mapping[str, Series]) -> Table:
    """Returns the latest of every number, and its range."""
    rows = []
    for name, series in sorted(numbers.items()):
        values = [value for _, value in series.points() if value == value]
        latest = "none" if series.latest is None else series.latest
        extremes = (min(values), max(values)) if values else ("none", "none")
        rows.append((name, latest, *extremes, series.num_values))
    return Table(
        "Numbers",
        rows,
        ("name", "latest", "lowest", "highest", "values"),
        "Lowest and highest are of the points drawn, each a mean of several values in a long run.",
    )


def phases(seconds: Mapping[str, float]) -> Table:
    """Returns how the host's time divides into phases."""
    total = sum(seconds.values()) or 1.0
    rows = [(name, phase_s, f"{phase_s / total:.1%}") for name, phase_s in seconds.items()]
    return Table("Time", rows, ("what", "seconds", "share"), "Of the host, on rank 0.")


def plugin_costs(state: StateView) -> Table:
    """Returns each plugin's share of the run, if each call was timed."""
    trace = state.plugins.get("trace")
    title = "Cost of plugins"
    columns = ("plugin", "hook", "calls", "ms a call", "seconds")
    if trace is None or not _is_of("eventloop_trace", trace):
        note = "Their calls weren't timed; `-p trace` of eventloop-trace times them."
        return Table(title, (), columns, note)
    rows = [
        (
            share.plugin,
            share.hook,
            share.calls,
            share.own_ns / max(share.calls, 1) / 1e6,
            share.own_ns / 1e9,
        )
        for share in trace.spans.shares()[:40]
    ]
    note = "Of the host, since this process began; without what their calls enclose."
    return Table(title, rows, columns, note)


def _is_of(package: str, plugin: object) -> bool:
    """Returns whether a plugin comes from a package, which may not be installed."""
    return type(plugin).__module__.partition(".")[0] == package


def _weights(checkpoint: str | None) -> str:
    return "the last weights" if checkpoint is None else f"the weights of {checkpoint}, the best"


def _changed_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, value in settings.items():
        default = defaults.get(name)
        if value != default and str(value) != str(default):
            yield f"{name}={value}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."
