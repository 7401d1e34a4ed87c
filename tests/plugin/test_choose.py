"""Which plugins take part."""

from __future__ import annotations

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Choice, Reason
from eventloop.errors import UsageError, raise_all
from eventloop.plugin.choose import choose, problems_of, relation_problems
from eventloop.plugin.records import Found


def found(name: str, distribution: str = "", version: str = "1.0") -> Found:
    point = EntryPoint(name, "module:Plugin", "eventloop.algorithms")
    return Found(name, "algorithm", point, distribution or f"eventloop-{name}", version)


MIXUP, EMA = found("mixup"), found("Weight-EMA")


def statuses(choice: Choice) -> list[tuple[str, str]]:
    return [(one.status, one.reason) for one in choose([MIXUP, EMA], choice)]


def refuse(plugins: list[Found], choice: Choice) -> None:
    raise_all(problems_of(choose(plugins, choice), choice))


def test_installed_means_active():
    """This is the promise of the project."""
    assert statuses(Choice()) == [("active", ""), ("active", "")]


def test_a_plugin_is_switched_off_by_name():
    """Names are compared with case, dashes and underscores folded."""
    choice = Choice.parse(["no:weight_ema"])

    assert statuses(choice) == [("active", ""), ("off", "-p no:weight_ema")]


def test_without_autoload_only_the_named_take_part():
    """--no-plugins -p X leaves core, task and X."""
    choice = Choice(insist=("mixup",), autoload=False, autoload_reason="--no-plugins")

    assert statuses(choice) == [("active", "-p mixup"), ("off", "--no-plugins")]


def test_plugins_that_watch_can_be_loaded_alone():
    """Installed algorithms stay off; a callback, and what is named, take part."""
    point = EntryPoint("watch", "module:Plugin", "eventloop.callbacks")
    watch = Found("watch", "callback", point, "eventloop-watch", "1.0")
    choice = Choice(insist=("mixup",), autoload="callbacks", autoload_reason="a bridge")

    actual = [(one.status, one.reason) for one in choose([MIXUP, EMA, watch], choice)]

    assert actual == [("active", "-p mixup"), ("off", "a bridge"), ("active", "")]


@pytest.mark.parametrize("value", ["mixpu", "no:mixpu"])
def test_a_name_that_matches_nothing_is_refused_with_the_closest(value):
    """A misspelt switch would leave the plugin as it was."""
    with pytest.raises(UsageError, match="no plugin is named 'mixpu'; the closest is 'mixup'"):
        refuse([MIXUP, EMA], Choice.parse([value]))


@pytest.mark.parametrize("values", [["mixup", "no:mixup"], ["no:Mix-Up", "mix_up"]])
def test_a_plugin_can_not_be_wanted_and_unwanted(values):
    """Whichever won, somebody would be surprised."""
    with pytest.raises(UsageError, match="contradict each other"):
        Choice.parse(values)


@pytest.mark.parametrize("value", ["", "no:"])
def test_a_choice_without_a_name_is_refused(value):
    """An empty shell variable leads to it."""
    with pytest.raises(UsageError, match="names no plugin"):
        Choice.parse([value])


def test_two_distributions_with_one_name_may_be_off():
    """The way out that the message names must be one."""
    twins = [found("mixup", "one"), found("mixup", "two")]

    selected = choose(twins, Choice.parse(["no:mixup"]))

    assert [one.status for one in selected] == ["off", "off"]


@pytest.mark.parametrize("kind", ["run", "task"])
def test_a_run_in_progress_judges_reasons_by_kind(kind):
    """A plugin's own words, of why it doesn't suit a task, may be those of a reason of ours."""
    then = Reason("not part of this run's subject", kind)
    choice = Choice(begun_with=frozenset(), off_then={"mixup": then})

    (one,) = choose([MIXUP], choice)

    prefix = "" if kind == "run" else "not part of this run: off when it began, "
    remembered = "run" if kind == "run" else "unsuitable"
    assert (one.reason, one.kind) == (f"{prefix}{then.text}", remembered)


def acts(state):
    return 1


def relations(*plugins):
    """Gives the first lines of the problems."""
    return [error.what for error in relation_problems(plugins, [])]


def test_a_plugin_gets_what_it_requires_or_stops_the_run(plugin):
    """Training without it would be another training."""
    needy = plugin("needy", batch_end=acts)
    needy.target.requires = ("ema",)

    assert relations(needy) == ["needy requires ema, which isn't installed"]
    assert relations(needy, plugin("EMA", batch_end=acts)) == []


@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("requires", "ema>=0.2", None),
        ("requires", "ema>=0.3", "needy requires ema>=0.3, and 0.2.1 is installed"),
        ("requires", "swa>=0.3", "needy requires swa>=0.3, which isn't installed"),
        ("conflicts", "ema<0.2", None),
        ("conflicts", "ema<0.3", "needy and ema<0.3 can't work together, says needy"),
    ],
)
def test_relations_may_have_versions(plugin, attribute, value, what):
    """What one offers to another comes and goes with its versions."""
    needy = plugin("needy", batch_end=acts)
    setattr(needy.target, attribute, (value,))

    problems = relations(needy, plugin("ema", distribution="eventloop-ema", batch_end=acts))

    assert problems == ([] if what is None else [what])


def test_plugins_that_conflict_are_refused(plugin):
    """One of them knows that the result would be wrong."""
    cut = plugin("cut", batch_end=acts)
    cut.target.conflicts = "mix"

    (problem,) = relations(cut, plugin("mix", batch_end=acts))

    assert problem == "cut and mix can't work together, says cut"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("watch", "for a class in the file write `-p ./watch.py:Watch`"),
        ("other", "list what is installed with `eventloop plugins`"),
    ],
)
def test_a_name_that_is_a_file_in_the_folder_is_told_how_it_is_named(
    name, line, tmp_path, monkeypatch
):
    """`-p watch` beside watch.py isn't about an installed plugin."""
    (tmp_path / "watch.py").write_text("")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError) as caught:
        refuse([MIXUP], Choice(insist=(name,)))

    assert line in str(caught.value)
