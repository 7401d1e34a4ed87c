"""What a project and a site say about plugins as a whole."""

from __future__ import annotations

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Choice
from eventloop.config.unknown_names import unknown_keys
from eventloop.errors import PluginError, SettingError, UsageError, raise_all
from eventloop.plugin.choose import choose, problems_of
from eventloop.plugin.records import Found


def found(name: str, version: str = "1.0") -> Found:
    point = EntryPoint(name, "module:Plugin", "eventloop.algorithms")
    return Found(name, "algorithm", point, f"eventloop-{name}", version)


INSTALLED = (found("ema", "0.1"), found("mixup"), found("progress"))


@pytest.fixture
def statuses(read_configuration):
    """Returns what takes part, or why it doesn't, by name."""

    def statuses(*args, **kwargs) -> dict[str, str]:
        configuration = read_configuration(*args, **kwargs)
        selected = chosen(INSTALLED, configuration.choice, configuration.rules)
        return {one.found.name: one.reason or one.status for one in selected}

    return statuses


def chosen(found, choice, rules):
    selected = choose(found, choice, rules)
    raise_all(problems_of(selected, choice, rules))
    return selected


def refusal(kind, function, *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_a_project_switches_plugins_off(statuses):
    """What everybody who trains this project has to type is typed once."""
    actual = statuses('disable = ["Mixup"]')

    assert actual == {"ema": "active", "mixup": "disable, pyproject.toml", "progress": "active"}


def test_only_what_is_allowed_takes_part(statuses):
    """A project that was checked with some plugins doesn't want what comes in later."""
    actual = statuses('allow = ["ema"]')

    assert actual["ema"] == "active"
    assert actual["mixup"] == actual["progress"] == "not in allow, pyproject.toml"


@pytest.mark.parametrize("rule", ['disable = ["mixup"]', 'allow = ["ema"]'])
def test_a_flag_is_stronger_than_the_project(statuses, rule):
    """Strongest first: flag, environment, --config, pyproject.toml."""
    assert statuses(rule, "mixup")["mixup"] == "-p mixup"


def test_a_stronger_layer_replaces_a_list(statuses):
    """As with every setting."""
    actual = statuses('disable = ["mixup"]', config="disable: [ema]")

    assert actual["mixup"] == "active"
    assert actual["ema"].startswith("disable, ")


@pytest.mark.parametrize("rule", ['disable = ["mixup"]', 'allow = ["ema"]'])
def test_the_site_is_stronger_than_a_flag(statuses, rule):
    """Its rules can't be loosened below it, and the message says whose they are."""
    message = refusal(PluginError, statuses, "", "mixup", site=rule)

    assert "mixup was asked for, but the site switches it off" in message
    assert "site.toml" in message
    assert statuses("disable = []", site=rule)["mixup"].endswith("site.toml")


def test_the_site_may_name_what_is_not_installed(statuses):
    """One file serves many environments."""
    assert statuses(site='disable = ["nosuch"]')["ema"] == "active"


@pytest.mark.parametrize("key", ["disable", "allow"])
def test_a_rule_for_a_name_that_matches_nothing_is_refused(statuses, key):
    """The plugin that was meant would go on training."""
    message = refusal(SettingError, statuses, f'{key} = ["mixpu"]')

    assert f"{key} names 'mixpu', but no plugin has this name; the closest is 'mixup'" in message
    assert "pyproject.toml" in message


@pytest.mark.parametrize("key", ["disable", "allow"])
def test_a_rule_for_a_package_without_a_plugin_says_what_it_adds(statuses, key):
    """`eventloop-experiments` is installed, and the name isn't misspelt."""
    message = refusal(SettingError, statuses, f'{key} = ["ablate"]')

    assert f"{key} names 'ablate': eventloop-experiments is installed" in message
    assert "adds the command" in message
    assert "the closest" not in message


MISSING = 'required = ["cutmix>=0.2"]', "pip install 'eventloop-cutmix>=0.2'"
WRONG = 'required = ["ema>=0.2"]', "pip install 'eventloop-ema>=0.2'"


@pytest.mark.parametrize(("rule", "line"), [MISSING, WRONG])
@pytest.mark.parametrize("origin", ["project", "site"])
def test_what_is_required_must_be_there_in_the_right_version(statuses, rule, line, origin):
    """The line to paste makes it so."""
    message = refusal(PluginError, statuses, **{origin: rule})

    assert f"`{line}`" in message
    assert ("site.toml" if origin == "site" else "pyproject.toml") in message


@pytest.mark.parametrize("specifier", ["", ">=0.1", ">=0.1,<1", "==0.1"])
def test_what_is_required_and_there_takes_part(statuses, specifier):
    """Specifiers are pip's."""
    assert statuses(f'required = ["ema{specifier}"]')["ema"] == "active"


@pytest.mark.parametrize(
    "given", [{"site": 'required = ["ema"]'}, {"project": 'required = ["ema"]'}]
)
def test_what_is_required_can_not_be_switched_off(read_configuration, given):
    """Neither a flag nor another rule does it in silence."""
    configuration = read_configuration(**given)
    choice = Choice.parse(["no:ema"])

    message = refusal(PluginError, chosen, INSTALLED, choice, configuration.rules)

    assert "ema is required, but off: -p no:ema" in message


def test_required_is_as_good_as_named(statuses, read_configuration):
    """A project that switches autoload off says with `required` what it wants."""
    actual = statuses('autoload = false\nrequired = ["ema"]')

    assert actual["ema"] == "required, pyproject.toml"
    assert actual["mixup"] == "autoload=false, pyproject.toml"
    assert read_configuration('required = ["ema"]').who_insists(INSTALLED[0])
    assert not read_configuration().who_insists(INSTALLED[0])


def test_without_plugins_the_project_requires_none_but_the_site_does(statuses):
    """`Trainer(autoload=False)` is stronger than the project; tests rely on it."""
    actual = statuses('required = ["ema"]', flags={"autoload": False})
    by_site = statuses(site='required = ["ema"]', flags={"autoload": False})

    assert actual["ema"] == "autoload=false, Trainer(...)"
    assert by_site["ema"].startswith("required, ")


def test_rules_are_no_settings(read_configuration):
    """They stand among them in the file, and aren't checked as such."""
    configuration = read_configuration('disable = ["mixup"]\nrequired = []\nseed = 3')

    assert [*unknown_keys(configuration.layers, {"mixup": None})] == []
    assert configuration.settings().seed == 3


def test_a_flag_can_not_name_a_rule(read_configuration):
    """`-p no:mixup` is how a rule is said there."""
    with pytest.raises(UsageError, match="no setting is named 'disable'"):
        read_configuration(flags={"disable": "mixup"}).settings()


def test_names_are_folded(statuses):
    """As everywhere."""
    assert statuses('disable = ["MIXUP"]')["mixup"].startswith("disable")
