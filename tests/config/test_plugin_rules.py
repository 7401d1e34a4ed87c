"""The rules of a project and of a site about plugins: their form, and which one wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.errors import SettingError


def test_owners_are_merged_and_the_site_has_the_last_word(read_configuration):
    """Tables are merged entry by entry, as those of options."""
    rules = read_configuration(
        'owners = {loss = "a", forward = "a"}', site='owners = {loss = "task"}'
    ).rules

    assert {action: value.value for action, value in rules.owners.items()} == {
        "loss": "task",
        "forward": "a",
    }
    assert Path(rules.owners["loss"].source).name == "site.toml"


@pytest.mark.parametrize(
    "rule",
    [
        'disable = "mixup"',
        "allow = [1]",
        'disable = ["mixup", "Mix-Up", "mixup"]',
        'required = ["ema=>1"]',
        'required = ["ema @ https://x"]',
        'order = ["ema"]',
        'order = {all = "ema"}',
        "owners = {loss = 1}",
    ],
)
@pytest.mark.parametrize("origin", ["project", "site"])
def test_a_rule_of_another_form_is_refused(read_configuration, rule, origin):
    """With where it stands, and how to write it."""
    with pytest.raises(SettingError) as caught:
        read_configuration(**{origin: rule})

    assert "fix" in str(caught.value)
    assert ("site.toml" if origin == "site" else "pyproject.toml") in str(caught.value)
