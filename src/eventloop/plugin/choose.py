"""Step 2, choose: decides which of the discovered plugins take part; finds unmet requirements and conflicts."""

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
    found: Sequence[Found], choice: Choice, rules: Rules | None = None
) -> tuple[Plugin, ...]:
    """Decides for every discovered plugin whether it takes part, even with problems in the choice.

    Args:
        rules: of the configuration; none by default.

    Returns:
        The plugins, chosen or off; those whose name can't be used have failed.
    """
    rules = rules or Rules()
    local = sorted((entry for entry in found if entry.local), key=lambda entry: entry.by_flag)
    files = {fold(entry.name): entry for entry in local}  # what a flag names is stronger
    plugins = [_decide(entry, choice, rules, files.get(fold(entry.name)), found) for entry in found]
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
    known = set(map(fold, names))
    # What a task brings can be switched off; before it is built, that isn't known.
    judged = sorted(choice.insist) + (sorted(choice.off) if passed is not None else [])
    for name in judged:
        if fold(name) not in known:
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

    A site's file is for many environments, so its names aren't checked.
    """
    known = {fold(name) for name in installed}
    written = [("disable", value) for value in rules.disable.values()]
    written += [("allow", Value(name, one.source)) for one in rules.allow for name in one.value]
    for key, value in written:
        if value.source != rules.site and fold(value.value) not in known:
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
                way_out + "; what the site says can't be overruled",
            )


def _refused(plugin: Plugin, what: str, fix: str, **at: str) -> PluginError:
    return PluginError(what, subjects=[plugin], plugin=plugin.origin, **at, fix=fix)


def ban(name: str, rules: Rules, *, by_site: bool = False) -> Reason | None:
    """Returns why a plugin must not be active; None if it can be.

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
    found: Found, choice: Choice, rules: Rules, from_file: Found | None, all_found: Sequence[Found]
) -> Plugin:
    """Decides for one plugin; the strongest rule comes first."""
    if reason := ban(found.name, rules, by_site=True):
        return Plugin.of(found, "off", reason)
    if found.by_flag:
        return Plugin.of(found, reason=Reason(f"-p {found.entry_point.value}", "flag"))
    if is_switched_off(found.name, choice):
        typed = next(name for name in choice.off if fold(name) == fold(found.name))
        return Plugin.of(found, "off", _by_flag(f"-p no:{typed}"))
    if from_file is not None and from_file is not found and from_file.local is not None:
        taken = f"{from_file.local} takes its place"
        return Plugin.of(found, "off", Reason(taken, "flag", from_file.way_out))
    banned = ban(found.name, rules)
    if not is_in_range(__version__, found.needs):
        return Plugin.of(found, "off", _by_version(found, all_found))
    if fold(found.name) in map(fold, choice.insist):
        is_due_to_it = banned or choice.autoload is not True
        return Plugin.of(found, reason=_by_flag(f"-p {found.name}") if is_due_to_it else Reason(""))
    if reason := banned or choice.stays_out(found):
        return Plugin.of(found, "off", reason)
    if choice.autoload is True or choice.autoload == found.role + "s":
        return Plugin.of(found)
    if reason := rules.requires(found.name):
        return Plugin.of(found, reason=reason)
    return Plugin.of(found, "off", _by_flag(choice.autoload_reason)._replace(kind="autoload"))


def _by_version(found: Found, all_found: Iterable[Found]) -> Reason:
    from eventloop.plugin.static_check import foreign_hooks  # reads sources: a run needn't

    core = f"torch-eventloop{found.needs}"
    fix = f"{pip('install', core)}, or {pip('install -U', found.distribution)}"
    names = " and ".join(foreign_hooks(found, all_found))
    which = f", which has {names}; " if names else ", and "
    return Reason(f"needs {core}{which}{__version__} is installed", "version", fix)


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


def _wrong_version(required: Requirement, found: Found) -> PluginError:
    wanted = f"{found.distribution}{required.specifier}"
    return PluginError(
        f"{required.name}{required.specifier} is required, but {found.version or 'a file'} is "
        "there",
        subjects=[found],
        plugin=found.origin,
        source=required.source,
        fix=pip("install", wanted)
        if found.distribution
        else f"leave {shell('-p', found.entry_point.value)} out",
    )


def relation_problems(plugins: Sequence[Plugin], off: Sequence[Plugin]) -> Iterator[PluginError]:
    """Finds plugins that require an inactive plugin, or conflict with an active one."""
    active = {fold(one.name): one for one in plugins if one.role != "core"}
    reasons = {fold(plugin.name): plugin.reason for plugin in off}
    for plugin in plugins:
        for name, versions in map(_parsed, plugin.facts.requires):
            other = active.get(fold(name))
            reason = reasons.get(fold(name))
            why = "which isn't installed"
            fix = pip("install", f"{distribution_of(name)}{versions}")
            if use := use_without_plugin(name):
                why = "which isn't a plugin"
                fix = f"take it out of `requires`; {use}"
            if other is not None:
                if not other.version or is_in_range(other.version, versions):
                    continue
                why = f"and {other.version} is installed"
                fix = pip("install", f"{other.distribution}{versions}")
            elif reason is not None:
                why = "which is off: " + reason
                fix = "switch it on"
            yield PluginError(
                f"{plugin.name} requires {name}{versions}, " + why,
                subjects=[plugin, *filter(None, [other])],
                plugin=plugin.origin,
                fix=f"{fix}, or " + plugin.way_out,
            )
        for name, versions in map(_parsed, plugin.facts.conflicts):
            other = active.get(fold(name))
            if other and (not versions or is_in_range(other.version, versions)):
                names = (plugin.name, other.name)
                yield PluginError(
                    f"{plugin.name} and {other.name}{versions} can't work together, says {plugin.name}",
                    subjects=[plugin, other],
                    plugins=f"{plugin.origin}, {other.origin}",
                    fix=f"switch one off: {' or '.join(map(switch_off, names))}",
                )


def _parsed(text: str) -> tuple[str, str]:
    """Splits `"ema>=0.2"` into a plugin's name and a version range."""
    return split_requirement(text) or (text, "")
