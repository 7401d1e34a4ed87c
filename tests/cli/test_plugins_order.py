"""`eventloop plugins order`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("no_others")


def as_json(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_order_gives_the_reason_for_each_pair(run, two, only):
    """Role, edge declared by whom, phase, name."""
    plans = {plan["hook"]: plan for plan in as_json(run("plugins", "order", "--json", *only))}

    calls = plans["batch_end"]["calls"]
    assert [one["plugin"] for one in calls] == ["aa-test", "bb-test"]
    assert calls[1]["reason"].startswith("edge: declared by bb-test (eventloop-bb-test 1.0)")
    assert [(one["depth"], one["how"]) for one in plans["loss"]["calls"]] == [
        (0, "wrapper"),
        (1, "owner"),
    ]
    assert plans["loss"]["owner"] == "bb-test"


def test_order_of_one_hook_is_drawn_as_nesting(run, two, only):
    """What a wrapper encloses stands inside it."""
    lines = run("plugins", "order", "loss", *only).out.splitlines()

    assert lines[1].split()[:4] == ["loss", "aa-test", "algorithm", "wrapper"]
    assert lines[2].startswith("        bb-test") or "  bb-test" in lines[2]
    assert "no plugin implements fit_end" in run("plugins", "order", "fit_end", *only).out


def test_order_names_the_task_where_it_is_chosen(run, two, only):
    """`owners` may prefer the task to a plugin."""
    (two / "pyproject.toml").write_text('[tool.eventloop.owners]\nloss = "task"\n')

    (plan,) = as_json(run("plugins", "order", "loss", "--json", *only))

    assert plan["owner"] == "task"


def test_the_users_order_is_shown_with_where_it_stands(run, two, only):
    """It wins over a plugin's."""
    (two / "pyproject.toml").write_text(
        '[tool.eventloop.order]\nbatch_end = ["bb-test", "aa-test"]\n'
    )

    (plan,) = as_json(run("plugins", "order", "batch_end", "--json", *only))

    assert [one["plugin"] for one in plan["calls"]] == ["bb-test", "aa-test"]
    assert "order.batch_end in pyproject.toml" in plan["calls"][1]["reason"]


def test_the_order_of_wrappers_alone_is_shown(run, install):
    """Nobody owns the action without a task, but what encloses it can be seen."""
    code = (
        "from eventloop import hookimpl\n"
        "class Plugin:\n"
        "    @hookimpl(wrapper=True)\n"
        "    def loss(self, state):\n"
        "        return (yield)\n"
    )
    install("aa-test", code)

    shown = run("plugins", "order", "loss", "--no-plugins", "-p", "aa-test")

    assert shown.status == 0, shown.err
    assert "aa-test" in shown.out
