"""The markers `hookspec` and `hookimpl`."""

from __future__ import annotations

import pytest

from eventloop import hookimpl
from eventloop.actions import Actions
from eventloop.events import Events
from eventloop.hook_markers import PROJECT, ImplOptions, declared_hooks, hookspec, impl_options


class Declared:
    @hookspec(per="batch")
    def opened(self, state): ...

    @hookspec(per="batch", closes="opened")
    def closed(self, state, numbers):
        """Called when it is closed.

        Fires: once.
        """

    @hookspec(per="run")
    def should_open(self, state): ...

    @hookspec(per="microbatch", firstresult=True)
    def open_it(self, state): ...

    def not_a_hook(self, state): ...


HOOKS = declared_hooks([Declared])


def test_hooks_are_read_in_the_order_of_declaration():
    """The order of `events.py` is the order of firing."""
    assert list(HOOKS) == ["opened", "closed", "should_open", "open_it"]


def test_the_name_and_firstresult_make_the_kind():
    """An event tells, a question asks, an action does."""
    kinds = {name: hook.kind for name, hook in HOOKS.items()}

    assert kinds == {
        "opened": "event",
        "closed": "event",
        "should_open": "question",
        "open_it": "action",
    }


def test_a_hook_tells_all_that_its_declaration_says():
    """How often, which pair, which arguments, and the contract."""
    hook = HOOKS["closed"]

    assert (hook.per, hook.closes, hook.argnames) == ("batch", "opened", ("state", "numbers"))
    assert hook.doc == "Called when it is closed.\n\nFires: once."


def test_every_hook_of_the_project_takes_the_state_first():
    """Per-event data lives on the State, so that new data never breaks a signature."""
    hooks = declared_hooks([Events, Actions])

    assert {hook.argnames[0] for hook in hooks.values()} == {"state"}


def test_every_contract_has_its_lines():
    """The reference is made of them, and who writes a plugin looks for them."""
    wanted = {
        "event": ("Fires:", "State:", "May:", "Must not:"),
        "question": ("Asked:", "Answer:"),
        "collection": ("Asked:", "State:", "Answer:", "Must not:"),
        "action": ("Asked:",),
    }
    lacking = [
        (hook.name, line)
        for hook in declared_hooks([Events, Actions]).values()
        for line in wanted[hook.kind]
        if f"\n{line}" not in hook.doc
    ]

    assert lacking == []


def test_what_closes_an_event_closes_one_that_exists():
    """Pairs are run in reverse; half a pair would be run in no order."""
    hooks = declared_hooks([Events, Actions])

    assert [hook.name for hook in hooks.values() if hook.closes and hook.closes not in hooks] == []


@pytest.mark.parametrize("mark", [hookimpl, hookimpl()])
def test_an_implementation_is_marked_with_or_without_parentheses(mark):
    """Both are written, as with pluggy."""

    def batch_end(state): ...

    assert mark(batch_end) is batch_end
    assert getattr(batch_end, f"{PROJECT}_impl")["wrapper"] is False
    assert impl_options(batch_end) == ImplOptions()


def test_pluggys_options_are_passed_on():
    """They are read by pluggy, not by us."""
    given = {"tryfirst": True, "wrapper": True, "optionalhook": True, "specname": "batch_end"}

    marked = getattr(hookimpl(**given)(lambda state: None), f"{PROJECT}_impl")

    assert given.items() <= marked.items()
    assert marked["trylast"] is False


def test_what_pluggy_does_not_know_is_read_from_the_method():
    """Options stay readable through the bound method, which is what a plan is made of."""

    class Plugin:
        @hookimpl(conditional=True)
        def forward(self, state): ...

    assert impl_options(Plugin().forward) == ImplOptions(conditional=True)


def test_an_option_that_does_not_exist_is_refused():
    """A misspelt `tryfirst` would leave the order as it was."""
    with pytest.raises(TypeError, match="tryfrist"):
        hookimpl(tryfrist=True)
