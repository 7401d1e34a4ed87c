"""All steps in a row: from what is installed and handed over to what takes part."""

from __future__ import annotations

import builtins
import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import importlib_metadata
import pluggy
import pytest
from importlib_metadata import EntryPoint

from eventloop import Trainer, TrainerBuilder, hookimpl
from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.errors import PluginError, SettingError
from eventloop.plugin.assemble import assemble
from eventloop.plugin.passed import accept, passed_plugins
from eventloop.plugin.records import Found, Plugin

HEARS = """
import builtins
from eventloop import hookimpl

class Plugin:
    '''Hears.

    Args:
        alpha: how much.
    '''

    def __init__(self, *, alpha: float = 0.4):
        self.alpha = alpha

    @hookimpl
    def batch_end(self, state):
        builtins.heard.append(type(self).__module__)
"""


class Watch:
    """A callback that isn't installed."""

    @hookimpl
    def batch_end(self): ...


class LabelSmoothing(Watch): ...


class EMA(Watch): ...


class Named:
    name = "my-watch"

    @hookimpl
    def batch_end(self): ...


def installed_as(name: str, value: str) -> Found:
    point = EntryPoint(name, value, "eventloop.callbacks")
    return Found(name, "callback", point, f"eventloop-{name}", "2.1")


@pytest.fixture
def assembled(plugin):
    """Assembles what is handed over, and nothing that is installed, with a task and a core."""

    def assembled(*algorithms, task=None, callbacks=(), **choice):
        registry = assemble(
            Configuration(choice=Choice(**{"autoload": False, "autoload_reason": "test"} | choice)),
            task=task or plugin("task", "task"),
            core=[plugin("core", "core", forward=lambda state: "core's")],
            passed=[
                *passed_plugins(algorithms, "algorithm", []),
                *passed_plugins(callbacks, "callback", []),
            ],
        )
        registry.raise_problems()
        return registry

    return assembled


# Names of what is handed over


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (Watch(), "watch"),
        (LabelSmoothing(), "label-smoothing"),
        (EMA(), "ema"),
        (Named(), "my-watch"),
        (ModuleType("mine.my_watch"), "my-watch"),
    ],
)
def test_an_object_is_named_by_its_name_or_its_class(target, name):
    """In kebab-case, as entry points are by convention."""
    (made,) = passed_plugins([target], "callback", [])

    assert (made.name, made.role, made.target) == (name, "callback", target)
    assert made.origin == f"{name} (Trainer(callbacks=...))"


@pytest.mark.parametrize("value", [f"{__name__}:Named", "exported_from_here.api : Named [extra]"])
def test_an_object_has_the_name_of_its_entry_point(monkeypatch, value):
    """Wherever the package exports its class from: it is what is installed, with its version."""
    package = ModuleType("exported_from_here.api")
    package.Named = Named
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Named.__module__])

    found = [installed_as("other", "not.imported:Named"), installed_as("jsonl", value)]
    (made,) = passed_plugins([Named()], "callback", found)

    assert (made.name, made.origin) == ("jsonl", "jsonl (eventloop-jsonl 2.1)")


@pytest.mark.parametrize("value", ["", "not a name", ":", "os:", "os:nothing.here"])
def test_an_entry_point_that_names_nothing_is_nobodys(value):
    """A broken package that is switched off mustn't break others."""
    (made,) = passed_plugins([Watch()], "callback", [installed_as("broken", value)])

    assert made.name == "watch"


def test_what_is_handed_over_in_python_obeys_the_site(read_configuration):
    """A project's rules are about what is installed; a site's are about what runs."""
    plugins = [Plugin("mixup", "callback", Watch(), source="Trainer(callbacks=...)")]

    (problem,) = accept(plugins, read_configuration(site='disable = ["mixup"]'))[1]

    assert "mixup was passed, but the site switches it off" in str(problem)
    assert accept(plugins, read_configuration('disable = ["mixup"]')) == (plugins, [])


def test_a_class_is_no_plugin(assembled):
    """Its hooks would be called without `self`."""
    with pytest.raises(PluginError) as caught:
        assembled(callbacks=[Watch])

    assert str(caught.value) == (
        "Trainer(callbacks=...) was given the class Watch, not an instance of it\n"
        "  fix  write Watch(...)"
    )


@pytest.mark.parametrize(
    ("role", "target", "message"),
    [
        (
            "algorithms",
            "mixup",
            r"\['mixup'\] holds a str, not a plugin\n  fix  write Mixup\(...\)",
        ),
        ("algorithms", None, r"\[None\] holds None, not a plugin"),
        ("callbacks", 3, r"\[3\] holds an int, not a plugin"),
        ("callbacks", type("A", (), {"state_dict": print})(), r"\[.*\] holds an A, not a plugin"),
    ],
)
def test_what_implements_no_hook_is_no_plugin(assembled, role, target, message):
    """It would be listed as active and do nothing."""
    with pytest.raises(PluginError, match=f"{role}={message}"):
        assembled(*[target] * (role == "algorithms"), callbacks=[target] * (role == "callbacks"))


@pytest.mark.parametrize("given", [Watch(), "mixup", None, {"watch": Watch()}])
@pytest.mark.parametrize("role", ["algorithms", "callbacks"])
def test_plugins_are_handed_over_in_a_list(role, given, make_task, clean):
    """To the trainer and to the task; the message shows what to write."""
    message = rf"{role}=.* is not a list; write {role}=\[...\]"

    with pytest.raises(TypeError, match=message):
        Trainer(make_task(), **{role: given})
    with pytest.raises(TypeError, match=message):
        make_task(**{role: given})


@pytest.mark.parametrize("others", [{"callbacks": [Watch()]}, {}])
def test_two_of_one_name_are_refused(assembled, others):
    """Nobody could say which of them is meant; roles have no names of their own."""
    algorithms = [Watch()] if others else [Watch(), Watch()]

    with pytest.raises(PluginError) as caught:
        assembled(*algorithms, **others)

    other = "callbacks" if others else "algorithms"
    assert str(caught.value) == (
        "two plugins are named 'watch': watch (Trainer(algorithms=...)) and "
        f"watch (Trainer({other}=...))\n"
        "  fix  give one of them another `name`, or leave it out"
    )


@pytest.mark.parametrize("name", ["task", "Core"])
def test_a_reserved_name_is_refused(assembled, name):
    """`--task.lr` is the task's; a plugin of that name could not be told from it."""
    target = Named()
    target.name = name

    with pytest.raises(PluginError, match=f"a plugin can't be named '{name}'"):
        assembled(target)


# Owners


def test_owners_come_in_three_layers(assembled, plugin):
    """Plugin, then task, then core; who only wraps or may pass owns nothing."""
    options = {"conditional": True, "tryfirst": True}
    maybe = plugin("maybe", forward=(lambda state: None, options)).target
    around = plugin("around", forward=(lambda state: (yield), {"wrapper": True})).target
    maybe.name, around.name = "maybe", "around"
    task = plugin("task", "task", forward=lambda state: "task's")
    mine = plugin("mine", forward=lambda state: "mine").target
    mine.name = "mine"

    assert assembled(maybe, around).owner("forward").role == "core"
    assert assembled(maybe, around, task=task).owner("forward").role == "task"
    assert assembled(maybe, around, mine, task=task).owner("forward").name == "mine"


def test_who_may_pass_owns_where_nobody_else_does(assembled, plugin):
    """An action without default has the owner that a plugin brings."""
    maybe = plugin("maybe", loss=(lambda state: None, {"conditional": True})).target
    maybe.name = "maybe"

    assert assembled(maybe).owner("loss").name == "maybe"


def test_an_action_that_nobody_answers_has_no_owner(assembled):
    """Asking is allowed for every action, whoever implements what."""
    with pytest.raises(PluginError) as caught:
        assembled().owner("save_checkpoint")

    assert str(caught.value) == (
        "action save_checkpoint has no implementation\n"
        "  fix  implement save_checkpoint in the task or in an algorithm"
    )


def test_two_owners_of_one_action_are_refused(assembled, make_plugin):
    """Which of them acts can't depend on their names; the message names both and a way out."""
    first = make_plugin("b", forward=lambda state: 1)
    second = make_plugin("a", forward=lambda state: 2)

    with pytest.raises(PluginError) as caught:
        assembled(first, second)

    assert str(caught.value) == (
        "2 plugins claim the action forward: a (Trainer(algorithms=...)) and "
        "b (Trainer(algorithms=...))\n"
        "  fix  choose one in pyproject.toml, or leave the plugin out of `algorithms=[...]`:\n"
        "[tool.eventloop.owners]\n"
        'forward = "a"'
    )


def test_two_installed_owners_are_told_with_distribution_and_flag(install, plugin):
    """Both came by pip, and one of them goes with a flag."""
    for name in ("aa-test", "bb-test"):
        install(name, HEARS.replace("batch_end", "forward"))
    choice = Choice(insist=("aa-test", "bb-test"), autoload=False, autoload_reason="test")

    with pytest.raises(PluginError) as caught:
        assemble(Configuration(choice=choice), task=plugin("task", "task")).raise_problems()

    assert "aa-test (eventloop-aa-test 1.0) and bb-test (eventloop-bb-test 1.0)" in str(
        caught.value
    )
    assert 'switch the plugin off with `disable = ["bb-test"]`' in str(caught.value)


def test_what_pluggy_refuses_is_told_by_name(assembled, make_plugin, monkeypatch):
    """It has the last word on what fits, and knows no distributions."""

    def refuses(self, plugin, name=None):
        raise ValueError("no, thanks")

    monkeypatch.setattr(pluggy.PluginManager, "register", refuses)

    with pytest.raises(PluginError, match="pluggy refuses 'ema': no, thanks") as caught:
        assembled(make_plugin("ema"))

    assert "fix it, or leave the plugin out of `algorithms=[...]`" in str(caught.value)


# What is installed, in a trainer


@pytest.fixture
def heard(monkeypatch):
    """The modules of the installed plugins that were called, in order."""
    monkeypatch.setattr(builtins, "heard", [], raising=False)
    return builtins.heard


def with_only(*names: str, **settings: object) -> Configuration:
    """Lets no installed plugins take part but these, whatever else is installed here."""
    choice = Choice(insist=names, autoload=False, autoload_reason="test")
    return Configuration.read({"device": "cpu", "max_duration": "1ba"} | settings, choice=choice)


def test_discovery_in_any_order_gives_one_order_of_calls(
    install, heard, make_task, tmp_path, monkeypatch
):
    """The file system lists distributions as it likes; two machines must train alike."""
    names = ["mm-test", "Zz-test", "aa-test", "kk_test"]
    for name in names:
        install(name, HEARS, group=f"eventloop.{'algorithms' if name < 'l' else 'callbacks'}")
    folders = [into_a_folder_of_its_own(tmp_path, name) for name in names]
    path, listed, orders = list(sys.path), set(), set()

    for seed in range(25):
        random.Random(seed).shuffle(folders)
        monkeypatch.setattr(sys, "path", [*folders, *path])
        listed.add(tuple(one.name for one in importlib_metadata.entry_points()))
        with TrainerBuilder(with_only(*names)).build(make_task()) as trainer:
            trainer.fit()
        orders.add(tuple(heard))
        heard.clear()

    assert len(listed) > 10
    assert orders == {tuple(f"eventloop_{name}_test_module" for name in ("aa", "kk", "Zz", "mm"))}


def into_a_folder_of_its_own(tmp_path: Path, name: str) -> str:
    """Moves an installed distribution; gives the folder, for `sys.path`."""
    folder = tmp_path / f"site-{name}"
    folder.mkdir()
    for one in (tmp_path / "site").glob(f"eventloop_{name.replace('-', '_')}*"):
        one.rename(folder / one.name)
    return str(folder)


def test_an_object_takes_the_place_of_the_installed_one(install, heard, make_task):
    """Who hands it over has set its options; the installed one would act a second time."""
    install("aa-test", HEARS)
    install("bb-test", HEARS)
    aa = importlib.import_module("eventloop_aa_test_module").Plugin(alpha=0.1)

    configuration = with_only("aa-test", "bb-test")
    with TrainerBuilder(configuration).build(make_task(), algorithms=[aa]) as trainer:
        trainer.fit()

    assert trainer.state.plugin("aa-test") is aa
    assert [one.origin for one in trainer.plugins if one.role != "task"] == [
        "aa-test (eventloop-aa-test 1.0)",
        "bb-test (eventloop-bb-test 1.0)",
    ]
    assert heard == ["eventloop_aa_test_module", "eventloop_bb_test_module"]


def test_an_object_takes_a_place_by_its_name_alone(install, heard, make_task, make_plugin):
    """A variant of one's own stands in for the packaged one, which isn't even imported."""
    install("aa-test", "raise RuntimeError('imported')")
    mine = make_plugin("AA_test")

    with TrainerBuilder(with_only("aa-test")).build(make_task(), callbacks=[mine]) as trainer:
        assert trainer.state.plugin("aa-test") is mine
        assert trainer.off == tuple(one for one in trainer.off if one.found.name != "aa-test")


def test_a_plugin_that_fails_to_import_stops_the_trainer(install, make_task):
    """Before training, with its name, cause and ways out."""
    install("aa-test", "1 / 0")

    with pytest.raises(PluginError) as caught:
        TrainerBuilder(with_only("aa-test")).build(make_task())

    assert str(caught.value) == (
        "plugin 'aa-test' can't be imported: ZeroDivisionError: division by zero\n"
        "  plugin       aa-test (eventloop-aa-test 1.0)\n"
        "  entry_point  eventloop.algorithms: eventloop_aa_test_module:Plugin\n"
        '  fix          switch the plugin off with `disable = ["aa-test"]` in [tool.eventloop] of pyproject.toml, or remove it with '
        "`pip uninstall eventloop-aa-test`"
    )


def test_problems_of_every_step_are_told_at_once(install, make_task, make_plugin):
    """Import, options and hooks, of what is installed and of what is handed over."""
    install("aa-test", "1 / 0")
    install("bb-test", "class Plugin:\n    def __init__(self, *, teacher: str): ...")
    misspelt = make_plugin("cc", before_foward=lambda state: None)

    with pytest.raises(PluginError, match="3 problems with plugins") as caught:
        configuration = with_only("aa-test", "bb-test")
        TrainerBuilder(configuration).build(make_task(), algorithms=[misspelt])

    for part in ("'aa-test' can't be imported", "bb-test needs its option 'teacher'", "foward"):
        assert part in str(caught.value)


def test_options_come_from_the_environment_and_the_project(
    install, clean, make_task, monkeypatch, heard
):
    """A script and the command agree; the environment wins."""
    for name in ("aa-test", "bb-test", "cc-test"):
        install(name, HEARS)
    (clean / "pyproject.toml").write_text(
        "[tool.eventloop.plugins]\naa-test.alpha = 0.1\nbb_test.alpha = 0.1\n"
    )
    monkeypatch.setenv("EVENTLOOP_BB_TEST__ALPHA", "0.2")

    configuration = with_only("aa-test", "bb-test", "cc-test")
    with TrainerBuilder(configuration).build(make_task()) as trainer:
        options = {one.name: one.options for one in trainer.plugins if one.role != "task"}

    assert options == {"aa-test": {"alpha": 0.1}, "bb-test": {"alpha": 0.2}, "cc-test": {}}


def test_a_trainer_reads_environment_and_project_by_itself(install, clean, make_task, monkeypatch):
    """Nobody needs to hand a configuration over."""
    install("aa-test", HEARS.replace("batch_end", "fit_end"))
    (clean / "pyproject.toml").write_text("[tool.eventloop]\nmax_duration = '1ba'\n")
    monkeypatch.setenv("EVENTLOOP_AA_TEST__ALPHA", "0.2")

    with Trainer(make_task(), device="cpu") as trainer:
        assert trainer.state.plugin("aa-test").alpha == 0.2
        assert str(trainer.state.settings.max_duration) == "1ba"


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("EVENTLOOP_AA_TEST__ALHPA", "the closest is 'EVENTLOOP_AA_TEST__ALPHA'"),
        ("EVENTLOOP_AA_TSET__ALPHA", "'aa_tset', which isn't installed; the closest is 'aa_test'"),
    ],
)
def test_an_option_that_nobody_has_stops_the_trainer(
    install, make_task, monkeypatch, variable, message
):
    """It would have no effect."""
    install("aa-test", HEARS)
    monkeypatch.setenv(variable, "0.2")

    with pytest.raises(SettingError) as caught:
        TrainerBuilder(with_only("aa-test")).build(make_task())

    assert message in str(caught.value)


def test_a_plugin_that_is_off_is_known_with_the_reason(install, make_task):
    """The header says what doesn't take part, and why."""
    install("aa-test", "raise RuntimeError('imported')")

    with Trainer(make_task(), device="cpu", autoload=False) as trainer:
        off = {one.found.name: one.reason for one in trainer.off}

    assert off["aa-test"] == "autoload=false, Trainer(...)"


def test_an_unknown_plugin_is_refused_with_the_closest(make_trainer, make_plugin):
    """A plugin that asks for another must hear that it isn't there."""
    trainer = make_trainer(algorithms=[make_plugin("mixup")])

    with pytest.raises(PluginError, match="no active plugin is named 'mixpu'; the closest is"):
        trainer.state.plugin("mixpu")
