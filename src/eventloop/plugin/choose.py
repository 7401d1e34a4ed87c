"""Step 2, choose: decides which discovered plugins take part; finds unmet requirements and conflicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from eventloop import __version__
from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Cause, Choice, Reason
from eventloop.config.plugin_rules import Requirement, Rules
from eventloop.errors import EventloopError, PluginError, SettingError, UsageError, closest
from eventloop.fixes import distribution_of, install, pip, shell, switch_off, use_without_plugin
from eventloop.naming import camel, fold, is_in_range, split_requirement
from eventloop.plugin.name_problems import name_problems
from eventloop.plugin.records import Found, Plugin


def choose(
    plugins_found: Sequence[Found], choice: Choice, rules: Rules | None = None
) -> tuple[Plugin, ...]:
    """Decides for every discovered plugin whether it takes part, even if the choice has problems.

    Args:
        plugins_found: the discovered plugins.
        choice: the plugins that flags and settings select.
        rules: the configuration's rules; none by default.

    Returns:
        The plugins, with the stage "chosen", "off", or "failed" if the name can't be used.
    """
    rules = rules or Rules()
    local = sorted(
        (entry for entry in plugins_found if entry.local), key=lambda entry: entry.by_flag
    )
    # Plugins that a flag names come last, so that they replace a project's of the same name.
    files = {fold(entry.name): entry for entry in local}
    plugins = [
        _decide(entry, choice, rules, files.get(fold(entry.name)), plugins_found)
        for entry in plugins_found
    ]
    unusable = name_problems(plugin for plugin in plugins if plugin.stage == "chosen")
    return tuple(
        plugin.failed(unusable[plugin.found]) if plugin.found in unusable else plugin
        for plugin in plugins
    )


def problems_of(
    plugins: Sequence[Plugin],
    choice: Choice,
    rules: Rules | None = None,
    passed: Collection[str] | None = (),
) -> list[EventloopError]:
    """Returns the problems with a choice: unknown or ambiguous names, and unavailable plugins.

    Args:
        passed: names of plugins passed in Python; None if not known yet.
    """
    rules = rules or Rules()
    return [
        *_unknown_choices(plugins, choice, passed),
        *_unknown_names(rules, [*(plugin.name for plugin in plugins), *(passed or ())]),
        *dict.fromkeys(plugin.failure for plugin in plugins if plugin.failure is not None),
        *rule_problems(plugins, choice, rules, passed or ()),
    ]


def _unknown_choices(
    plugins: Sequence[Plugin], choice: Choice, passed: Collection[str] | None
) -> Iterator[UsageError]:
    names = sorted([*(plugin.name for plugin in plugins), *(passed or ())])
    folded_names = set(map(fold, names))
    # `-p no:NAME` can name a plugin of the task, so these names aren't checked before it is built.
    checked_names = sorted(choice.insist) + (sorted(choice.off) if passed is not None else [])
    for name in checked_names:
        if fold(name) not in folded_names:
            fix = install(name if name in choice.insist else "")
            if name in choice.insist and name.isidentifier() and Path(f"{name}.py").is_file():
                fix = f"for a class in the file write {shell('-p', f'./{name}.py:{camel(name)}')}"
            yield UsageError(f"no plugin is named {name!r}{closest(name, names)}", fix=fix)
    off = {fold(name): name for name in choice.off}
    for plugin in plugins:
        if plugin.by_flag and fold(plugin.name) in off:
            yield UsageError(
                f"-p {plugin.source} and -p no:{off[fold(plugin.name)]} contradict each other",
                subjects=[plugin],
                fix="leave one of them out",
            )


def _unknown_names(rules: Rules, installed: Collection[str]) -> Iterator[SettingError]:
    """Finds names in `disable` and `allow` that match no installed plugin.

    The names in a site's file aren't checked, because it is used for many environments.
    """
    folded_names = {fold(name) for name in installed}
    written = [("disable", value) for value in rules.disable.values()]
    written += [
        ("allow", Value(name, allowed.source)) for allowed in rules.allow for name in allowed.value
    ]
    for key, value in written:
        if value.source != rules.site and fold(value.value) not in folded_names:
            reason = f", but no plugin has this name{closest(value.value, sorted(installed))}"
            if use := use_without_plugin(value.value):
                reason = f": {use}"
            yield SettingError(
                f"{key} names {value.value!r}{reason}",
                source=value.source,
                fix="fix or remove the name; list what is installed with `eventloop plugins`",
            )


def rule_problems(
    plugins: Sequence[Plugin], choice: Choice, rules: Rules, passed: Collection[str] = ()
) -> Iterator[PluginError]:
    """Finds required plugins that are missing, and requested ones that the site forbids."""
    for required in rules.required:
        of_name = [plugin for plugin in plugins if fold(plugin.name) == fold(required.name)]
        active = [plugin for plugin in of_name if plugin.stage != "off"]
        if not of_name and fold(required.name) in map(fold, passed):
            continue
        if not of_name:
            yield _missing(required, [plugin.name for plugin in plugins])
        elif not active:
            yield _refused(
                of_name[0],
                f"{required.name} is required, but off: " + of_name[0].reason,
                of_name[0].undo + f", or take {required.name} out of required",
                source=required.source,
            )
        for plugin in active:
            assert plugin.found is not None
            is_known = plugin.found.path is not None or plugin.version != ""
            if is_known and not required.accepts(plugin.version):
                yield _wrong_version(required, plugin.found)
    for plugin in plugins:
        name = plugin.name
        is_requested = fold(name) in map(fold, choice.insist) or plugin.by_flag
        if plugin.stage == "off" and is_requested and plugin.kind == "version":
            yield _refused(plugin, f"{name} was asked for, but " + plugin.reason, plugin.undo)
        if plugin.stage == "off" and is_requested and plugin.kind == "site":
            way_out = plugin.way_out if plugin.by_flag else f"leave {shell('-p', name)} out"
            yield _refused(
                plugin,
                f"{name} was asked for, but the site switches it off: " + plugin.reason,
                way_out + "; the site's rules can't be overruled",
            )


def _refused(plugin: Plugin, message: str, fix: str, **fields: str) -> PluginError:
    return PluginError(message, subjects=[plugin], plugin=plugin.origin, **fields, fix=fix)


def ban(name: str, rules: Rules, *, by_site: bool = False) -> Reason | None:
    """Returns the reason why a plugin must not be active, or None if it may be.

    Args:
        by_site: whether to consider only the site's rules.
    """
    disabled = rules.disable.get(fold(name))
    if disabled and (not by_site or disabled.source == rules.site):
        kind: Cause = "site" if disabled.source == rules.site else "rule"
        return Reason(f"disable, {disabled.source}", kind, f"take {name!r} out of disable")
    for allowed in rules.allow:
        kind = "site" if allowed.source == rules.site else "rule"
        if (kind == "site" or not by_site) and fold(name) not in map(fold, allowed.value):
            return Reason(f"not in allow, {allowed.source}", kind, f"add {name!r} to allow")
    return None


def is_switched_off(name: str, choice: Choice) -> bool:
    """Returns whether `-p no:NAME` was given."""
    return fold(name) in map(fold, choice.off)


def _decide(
    plugin: Found, choice: Choice, rules: Rules, from_file: Found | None, all_found: Sequence[Found]
) -> Plugin:
    """Decides whether a plugin takes part; the rules are in order of precedence.

    Args:
        plugin: the discovered plugin.
        from_file: the plugin of this name in a file or module, which replaces an installed plugin.
        all_found: every discovered plugin.
    """
    if reason := ban(plugin.name, rules, by_site=True):
        return Plugin.of(plugin, "off", reason)
    if plugin.by_flag:
        return Plugin.of(plugin, reason=Reason(f"-p {plugin.entry_point.value}", "flag"))
    if is_switched_off(plugin.name, choice):
        typed = next(name for name in choice.off if fold(name) == fold(plugin.name))
        return Plugin.of(plugin, "off", _by_flag(f"-p no:{typed}"))
    if from_file is not None and from_file is not plugin and from_file.local is not None:
        reason_text = f"{from_file.local} takes its place"
        return Plugin.of(plugin, "off", Reason(reason_text, "flag", from_file.way_out))
    banned = ban(plugin.name, rules)
    if not is_in_range(__version__, plugin.needs):
        return Plugin.of(plugin, "off", _by_version(plugin, all_found))
    if fold(plugin.name) in map(fold, choice.insist):
        is_due_to_it = banned or choice.autoload is not True
        return Plugin.of(
            plugin, reason=_by_flag(f"-p {plugin.name}") if is_due_to_it else Reason("")
        )
    if reason := banned or choice.stays_out(plugin):
        return Plugin.of(plugin, "off", reason)
    if choice.autoload is True or choice.autoload == plugin.role + "s":
        return Plugin.of(plugin)
    if reason := rules.requires(plugin.name):
        return Plugin.of(plugin, reason=reason)
    return Plugin.of(plugin, "off", _by_flag(choice.autoload_reason)._replace(kind="autoload"))


def _by_version(plugin: Found, all_found: Iterable[Found]) -> Reason:
    from eventloop.plugin.static_check import foreign_hooks  # most runs don't need to read sources

    core = f"torch-eventloop{plugin.needs}"
    fix = f"{pip('install', core)}, or {pip('install -U', plugin.distribution)}"
    names = " and ".join(foreign_hooks(plugin, all_found))
    hooks_text = f", which has {names}; " if names else ", and "
    return Reason(f"needs {core}{hooks_text}{__version__} is installed", "version", fix)


def _by_flag(flag: str) -> Reason:
    return Reason(flag, "flag", f"leave `{flag}` out")


def _missing(required: Requirement, installed: Sequence[str]) -> PluginError:
    requirement = distribution_of(required.name) + required.specifier
    fix = f"install it, {pip('install', requirement)}, or take it out of required"
    if use := use_without_plugin(required.name):
        fix = f"take it out of required; {use}"
    return PluginError(
        f"{required.name} is required, but no plugin has this name"
        f"{closest(required.name, sorted(installed))}",
        subjects=[required],
        source=required.source,
        fix=fix,
    )


def _wrong_version(required: Requirement, plugin: Found) -> PluginError:
    requirement = f"{plugin.distribution}{required.specifier}"
    return PluginError(
        f"{required.name}{required.specifier} is required, but {plugin.version or 'a file'} is "
        "installed",
        subjects=[plugin],
        plugin=plugin.origin,
        source=required.source,
        fix=pip("install", requirement)
        if plugin.distribution
        else f"leave {shell('-p', plugin.entry_point.value)} out",
    )


def relation_problems(plugins: Sequence[Plugin], off: Sequence[Plugin]) -> Iterator[PluginError]:
    """Finds plugins that require an inactive plugin, or conflict with an active one."""
    active = {
        fold(active_plugin.name): active_plugin
        for active_plugin in plugins
        if active_plugin.role != "core"
    }
    reasons = {fold(plugin.name): plugin.reason for plugin in off}
    for plugin in plugins:
        for name, versions in map(_parsed, plugin.facts.requires):
            related = active.get(fold(name))
            reason = reasons.get(fold(name))
            problem = "which isn't installed"
            fix = pip("install", f"{distribution_of(name)}{versions}")
            if use := use_without_plugin(name):
                problem = "which isn't a plugin"
                fix = f"take it out of `requires`; {use}"
            if related is not None:
                if not related.version or is_in_range(related.version, versions):
                    continue
                problem = f"and {related.version} is installed"
                fix = pip("install", f"{related.distribution}{versions}")
            elif reason is not None:
                problem = "which is off: " + reason
                fix = "switch it on"
            yield PluginError(
                f"{plugin.name} requires {name}{versions}, " + problem,
                subjects=[plugin, *filter(None, [related])],
                plugin=plugin.origin,
                fix=f"{fix}, or " + plugin.way_out,
            )
        for name, versions in map(_parsed, plugin.facts.conflicts):
            related = active.get(fold(name))
            if related and (not versions or is_in_range(related.version, versions)):
                names = (plugin.name, related.name)
                yield PluginError(
                    f"{plugin.name} and {related.name}{versions} can't work together, says {plugin.name}",
                    subjects=[plugin, related],
                    plugins=f"{plugin.origin}, {related.origin}",
                    fix=f"switch one off: {' or '.join(map(switch_off, names))}",
                )


def _parsed(text: str) -> tuple[str, str]:
    """Splits `"ema>=0.2"` into a plugin's name and a version range."""
    return split_requirement(text) or (text, "")
