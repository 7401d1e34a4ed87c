"""A hook that is renamed, from both sides: who declares it, and who implements it, version by version."""

from __future__ import annotations

import warnings

import pytest

from eventloop import PluginError, hookimpl, hookspec
from eventloop.config.configuration import Configuration
from eventloop.plugin import static_check
from eventloop.plugin.assemble import assemble
from eventloop.plugin.declared_hooks import HOOKS

GOING = DeprecationWarning("ema_moved is ema_updated since 0.3, and goes in 0.4")
NO_SHARE = DeprecationWarning("ema_updated passes no share from 0.4 on; it is 1 - decay")


class Before:
    """The declarations of 0.2."""

    @hookspec(per="any")
    def ema_moved(self, state, decay): ...


class Between:
    """Those of 0.3: the old name warns, and is called first."""

    @hookspec(per="any", warn_on_impl=GOING)
    def ema_moved(self, state, decay): ...

    @hookspec(per="any", warn_on_impl_args={"share": NO_SHARE})
    def ema_updated(self, state, decay, share): ...


class After:
    """Those of 0.4."""

    removed_hooks = {"ema_moved": "renamed to ema_updated in 0.4"}

    @hookspec(per="any")
    def ema_updated(self, state, decay): ...


class Ema02:
    """Declares and calls, as in 0.2."""

    name, hookspecs = "ema", Before

    @hookimpl
    def batch_end(self, state):
        state.call("ema_moved", 0.9)


class Ema03(Ema02):
    """Calls both, the old one first."""

    hookspecs = Between

    @hookimpl
    def batch_end(self, state):
        state.call("ema_moved", 0.9)
        state.call("ema_updated", 0.9, share=0.1)


class Ema04(Ema02):
    """Calls the new one alone."""

    hookspecs = After

    @hookimpl
    def batch_end(self, state):
        state.call("ema_updated", 0.9)


class Old:
    """Implements the old name."""

    name = "old"

    def __init__(self):
        self.heard = []

    @hookimpl
    def ema_moved(self, state, decay):
        self.heard.append(decay)


class New:
    """Implements the new name."""

    name = "new"

    def __init__(self):
        self.heard = []

    @hookimpl
    def ema_updated(self, state, decay):
        self.heard.append(decay)


class Shares(New):
    """Takes an argument that is going."""

    @hookimpl
    def ema_updated(self, state, share):
        self.heard.append(share)


def heard_with(make_trainer, ema, listener) -> tuple[list[float], list[str]]:
    """Returns what a listener heard in a batch, and the warnings of the trainer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(algorithms=[ema()], callbacks=[listener], max_duration="1ba").fit()
    return listener.heard, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("ema", "listener", "heard", "warned"),
    [
        (Ema02, Old, [0.9], []),
        (Ema03, Old, [0.9], [GOING]),
        (Ema03, New, [0.9], []),
        (Ema03, Shares, [0.1], [NO_SHARE]),
        (Ema04, New, [0.9], []),
    ],
)
def test_a_renamed_hook_works_and_warns_for_one_version(make_trainer, ema, listener, heard, warned):
    """The author of a listener has a version's time; nothing changes for their users meanwhile."""
    assert heard_with(make_trainer, ema, listener()) == (heard, [*map(str, warned)])


@pytest.mark.parametrize(
    ("ema", "listener", "what"),
    [
        (Ema02, New, "no hook is named 'ema_updated'; the closest is"),
        (Ema04, Old, "no hook is named 'ema_moved'; it was renamed to ema_updated in 0.4"),
        (Ema04, Shares, "ema_updated has no argument 'share'"),
    ],
)
def test_versions_that_do_not_fit_are_told_by_name(make_trainer, ema, listener, what):
    """The old name isn't guessed at: the closest one could be another hook."""
    with pytest.raises(PluginError, match=what) as caught:
        make_trainer(algorithms=[ema()], callbacks=[listener()])

    assert f"plugin  {listener().name} (Trainer(callbacks=...))" in str(caught.value)


IMPLEMENTS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def batch_done(self, state): ...
"""


def test_a_misspelt_table_of_removed_hooks_is_refused(make_trainer):
    """Or the authors of implementations would not read what became of the hook."""

    class Misspelt(After):
        remove_hooks = {"ema_gone": "renamed to ema_updated in 0.4"}

    ema = type("Ema", (), {"name": "ema", "hookspecs": Misspelt})()

    with pytest.raises(PluginError, match="'remove_hooks'; the closest is 'removed_hooks'"):
        make_trainer(algorithms=[ema])


def test_a_hook_that_the_core_removed_is_named_with_what_became_of_it(install, monkeypatch):
    """From the table, by a run and by `plugins list`, which imports nothing."""
    gone = {"batch_done": "renamed to batch_end in 0.3"}
    monkeypatch.setattr(HOOKS, "removed", gone)
    monkeypatch.setattr(static_check, "REMOVED_HOOKS", gone)
    install("p", IMPLEMENTS)

    registry = assemble(Configuration.read({}))
    plugin = registry.find("p")

    what = "no hook is named 'batch_done'; it was renamed to batch_end in 0.3"
    assert registry.problems_of(plugin)[0].what == what
    assert static_check.static_check(plugin.found).problem == what
