"""How a checkpoint is described: its test metrics, when it was saved, and facts that a stranger wrote."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint.store import Store

RUN = "runs/a run"
NEWEST, OLDER = (Path(RUN, "checkpoints", name) for name in ("ba00000006", "ba00000003"))
EVIL = "\x1b[2J\r\nx\u202e\udc80[red]"


def as_json(ran, status=0):
    assert ran.status == status, ran.err
    return json.loads(ran.out)


@pytest.fixture
def chosen(run, tiny):
    """A task with a set to choose by and a test set, and how it is trained."""
    text = Path("tiny.py").read_text()
    sets = 'eval_dataloaders={"valid": loader}, test_dataloaders={"test": loader}'
    text = text.replace('eval_dataloaders={"test": loader, "valid": loader}', sets)
    Path("chosen.py").write_text(text)
    # The loss falls, so that the highest is that of the first evaluation.
    return (
        "fit",
        "chosen.py",
        "--no-plugins",
        "--run-dir",
        RUN,
        "--checkpoint-best",
        "max valid/loss",
    )


def test_what_test_sets_gave_stands_with_the_weights_that_they_had(run, chosen):
    """Beside the last checkpoint it would be taken for what its weights give."""
    run(*chosen)

    newest, older = as_json(run("checkpoints", RUN, "--json"))
    again = as_json(run("eval", "chosen.py", "--no-plugins", "--weights", str(OLDER), "--json"))
    lines = run("checkpoints", RUN).out.splitlines()

    assert newest["metrics"].keys() == older["metrics"].keys() == {"valid/accuracy", "valid/loss"}
    assert newest["tested"] == {}
    assert older["tested"] == {f"test/{name}": one for name, one in again["test"].items()}
    assert ["test/loss" in line for line in lines] == [False, False, True]
    assert as_json(run("checkpoints", RUN, "--json")) == [newest, older]


def test_without_a_best_one_the_test_sets_had_the_last_weights(run, chosen):
    """Then it is the newest that they belong to."""
    run(*chosen[:-2])

    newest, older = as_json(run("checkpoints", RUN, "--json"))

    assert newest["tested"].keys() == {"test/accuracy", "test/loss"}
    assert older["tested"] == {}


@pytest.mark.parametrize("given", [[], ["--checkpoint-interval", "none"]])
def test_test_sets_are_known_by_the_run_or_its_last_checkpoint(given, run, chosen):
    """Evaluated after the last was saved, or of a run that came without its manifest."""
    run(*chosen, *given)
    told = as_json(run("checkpoints", RUN, "--json"))
    Path(RUN, "manifest.json").unlink()

    without = as_json(run("checkpoints", RUN, "--json"))

    assert [bool(one["tested"]) for one in told if one["batch"] == 3] == [True]
    assert (without == told) == (not given)


def test_weights_that_were_tested_and_are_gone_are_named(run, chosen):
    """The numbers stay what they were."""
    run(*chosen)
    shutil.rmtree(OLDER)

    out = run("checkpoints", RUN).out

    assert re.search(
        r"\ntest sets: test/accuracy \S+, test/loss \S+, with the weights of ba00000003, which was removed\n$",
        out,
    )


@pytest.mark.parametrize(
    "tested",
    [EVIL, [EVIL], {"metrics": EVIL}, {"metrics": {EVIL: 1.0}, "checkpoint": EVIL, "batch": EVIL},
     {"metrics": {"a": 10**5000, "test/loss": None}, "checkpoint": ["x"], "batch": 10**5000}],
)  # fmt: skip
def test_a_strangers_manifest_of_a_run_leaves_the_terminal_alone(tested, run, saved):
    """It came with the folder."""
    sys.set_int_max_str_digits(0)
    Path(RUN, "manifest.json").write_text(json.dumps({"tested": tested}))
    sys.set_int_max_str_digits(4300)

    ran = run("checkpoints", RUN)

    assert (ran.status, ran.err) == (0, "")
    assert all(one.isprintable() or one == "\n" for one in ran.out)
    assert len(as_json(run("checkpoints", RUN, "--json"))) == 2


def hostile_facts():
    """Yields facts of forms that nobody expects, and text that would take over a terminal."""
    metrics = {EVIL: 1.0, "a": EVIL, "b": [1], 7: 1.0, "nan": float("nan"), "big": 10**5000}
    plugin = {"name": EVIL, "version": [EVIL], "role": {}, "options": {EVIL: EVIL * 10_000}}
    manifest = {"plugins": [plugin, EVIL, None, {"name": 7}], "task": {"source": f"a\n{EVIL}"},
                "settings": EVIL, "command_line": [EVIL, b"\x1b", 10**5000],
                "off": [{"name": [1]}], EVIL: EVIL}  # fmt: skip
    yield {"metrics": metrics, "moment": {"epoch": 10**5000}, "manifest": manifest, EVIL: EVIL}
    for other in (None, EVIL, [EVIL], {}, (1, 2), b"\x1b"):
        told = {"metrics": other, "moment": other, "manifest": other}
        yield told
        yield {"manifest": {"plugins": other, "task": other, "off": other, "command_line": other}}


@pytest.mark.parametrize("facts", list(hostile_facts()))
def test_a_strangers_facts_leave_terminal_and_json_alone(facts, run, clean):
    """Escapes that clear a screen, direction marks, lone surrogates, ints of 5,000 digits."""
    store = Store(Path("run/checkpoints"))
    evil = {"m" + EVIL: torch.ones(1), "text": EVIL, "big": 10**5000}
    store.save(1, {"model": {"w": torch.zeros(1)}}, {"manifest": {"task": {"source": "a"}}})
    store.save(2, {"model": evil}, facts)
    paths = [f"run/checkpoints/ba0000000{batch}" for batch in (1, 2)]

    listed = run("checkpoints", "run")
    compared = run("checkpoints", "diff", *paths)
    exported = run("export", "run", "m.safetensors")

    assert (listed.status, compared.status, exported.status) == (0, 1, 0)
    assert listed.err == compared.err == exported.err == ""
    for text in (*listed, *compared, *exported):
        assert all(one.isprintable() or one == "\n" for one in str(text))
    assert len(as_json(run("checkpoints", "run", "--json"))) == 2
    assert as_json(run("checkpoints", "diff", *paths, "--json"), status=1)["equal"] is False


def test_the_time_of_saving_may_be_unknown(run, saved):
    """It is the manifest's, of which there may be none."""
    (OLDER / "manifest.json").unlink()

    newest, older = as_json(run("checkpoints", RUN, "--json"))

    assert newest["saved"] is not None
    assert older["saved"] is None
    assert run("checkpoints", RUN).status == 0
