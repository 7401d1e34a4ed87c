"""`eventloop checkpoints`: a run's checkpoints listed, verified and compared."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop.checkpoint.store import Store
from eventloop.files import disk

RUN = "runs/a run"
NEWEST, OLDER = (Path(RUN, "checkpoints", name) for name in ("ba00000006", "ba00000003"))
EVIL = "\x1b[2J\r\nx\u202e\udc80[red]"


@pytest.fixture
def saved(run, tiny):
    """A run with two checkpoints, in a folder with a space in its name."""
    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", RUN)
    assert ran.status == 0, ran.err
    return tiny


def as_json(ran, status=0):
    assert ran.status == status, ran.err
    return json.loads(ran.out)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [RUN, f"{RUN}/", f"{RUN}/checkpoints"])
def test_a_run_is_listed_newest_first(where, run, saved):
    """As a run's folder, or the folder in it."""
    lines = run("checkpoints", where).out.splitlines()

    assert lines[0].split()[:6] == ["checkpoint", "batch", "epochs", "saved", "size", "verified"]
    assert [line.split()[:3] for line in lines[1:]] == [["ba00000006", "6", "2"],
                                                        ["ba00000003", "3", "1"]]  # fmt: skip
    assert all(" kB  yes " in line and "test/accuracy 0." in line for line in lines[1:])


def test_json_has_all_of_it(run, saved):
    """A program reads it."""
    newest, older = as_json(run("checkpoints", RUN, "--json"))

    assert (newest["checkpoint"], older["checkpoint"]) == (str(NEWEST), str(OLDER))
    assert (newest["batch"], newest["epoch"], newest["verified"]) == (6, 2, True)
    assert newest["bytes"] == sum(one.stat().st_size for one in NEWEST.iterdir()) - (
        NEWEST / "manifest.json").stat().st_size  # fmt: skip
    assert newest["metrics"].keys() == {
        "test/accuracy",
        "test/loss",
        "valid/accuracy",
        "valid/loss",
    }
    assert newest["saved"].startswith("20")


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
        r"\ntest sets: test/accuracy \S+, test/loss \S+, with the weights of ba00000003, which isn't there\n$",
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


STOPS = """
from eventloop import hookimpl


class Plugin:
    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == 4:
            state.request_stop("pruned by it at evaluation 1", "pruned")
"""


def test_why_a_run_was_stopped_is_listed(run, tiny, install):
    """A trial that was pruned isn't one that was trained to its end."""
    install("aa-test", STOPS)
    run("fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--run-dir", RUN)

    newest, older = as_json(run("checkpoints", RUN, "--json"))
    lines = run("checkpoints", RUN).out.splitlines()

    assert (newest["batch"], newest["status"]) == (4, "pruned")
    assert newest["stop_reason"] == "pruned by it at evaluation 1"
    assert (older["status"], older["stop_reason"]) == (None, None)
    assert ["pruned by it at evaluation 1" in line for line in lines] == [False, True, False]


def test_plugins_that_took_part_are_listed(run, tiny, install):
    """With their versions."""
    install("aa-test", version="1.5")
    run("fit", "tiny.py", "--no-plugins", "-p", "aa-test", "--run-dir", RUN)

    assert "aa-test 1.5" in run("checkpoints", RUN).out


def test_one_that_does_not_verify_is_marked_with_the_reason(run, saved):
    """Whoever resumes wants to know which one it will be; `--quick` sees sizes alone."""
    flip_a_bit(NEWEST / "model.safetensors")
    (OLDER / "training.json").write_bytes(b"")

    newest, older = as_json(run("checkpoints", RUN, "--json"))
    quick, _ = as_json(run("checkpoints", "list", RUN, "--json", "--quick"))

    assert newest["verified"] is older["verified"] is False
    assert newest["reason"].startswith("model.safetensors: its bytes aren't those")
    assert older["reason"].startswith("training.json: it has 0 bytes")
    assert (quick["verified"], quick["reason"]) == (None, "")
    assert "no" in run("checkpoints", RUN).out.splitlines()[1].split()
    assert "not read" in run("checkpoints", RUN, "--quick").out


def test_what_is_left_over_is_not_listed(run, saved):
    """What was being written, removed or replaced is none of the run's checkpoints."""
    folder = NEWEST.parent
    for name in (".tmp-ba00000009-0a1b2c3d-1-0a1b2c3d", ".was-ba00000006-0a1b2c3d-1-0a1b2c3d"):
        shutil.copytree(NEWEST, folder / name)
    (folder / "notes.txt").touch()

    assert len(as_json(run("checkpoints", RUN, "--json"))) == 2


def test_one_that_is_being_replaced_is_listed_where_it_is_the_only_one(run, saved):
    """A kill between two renames leaves this one, and the run goes on from it."""
    NEWEST.rename(NEWEST.parent / f".was-{NEWEST.name}-0a1b2c3d-1-0a1b2c3d")

    newest, _ = as_json(run("checkpoints", RUN, "--json"))

    assert (newest["batch"], newest["verified"]) == (6, True)


def test_a_checkpoint_elsewhere_stands_for_itself(run, saved):
    """One that somebody copied and renamed, or linked to."""
    shutil.copytree(NEWEST, "best")
    Path("link").symlink_to("best")

    for name in ("best", "link"):
        (row,) = as_json(run("checkpoints", name, "--json"))
        assert (row["batch"], row["verified"]) == (6, True)


def test_a_folder_without_checkpoints_is_told_of(run, saved):
    """With the runs in it, as whoever leaves out the last name means one of these."""
    Path("empty").mkdir()

    assert run("checkpoints", "empty") == (0, "there are no checkpoints in 'empty'\n", "")
    assert run("checkpoints", "empty", "--json").out == "[]\n"
    assert "in 'runs' itself, but it has the runs 'a run'" in run("checkpoints", "runs").out
    for rest in (["verify", "empty"], ["diff", "empty", RUN]):
        ran = run("checkpoints", *rest)
        assert ran.status == 2
        assert "there are no checkpoints in 'empty'" in ran.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["runs/a rum"], "no folder 'runs/a rum'; the closest is 'a run'"),
        (["nowhere/at/all"], "no folder 'nowhere/at/all'"),
        ([str(NEWEST / "manifest.json")], f"name the folder: '{NEWEST}'"),
        ([], "`eventloop checkpoints list` needs RUN"),
        (["verify"], "`eventloop checkpoints verify` needs PATH"),
        (["diff", RUN], "`eventloop checkpoints diff` needs B"),
        (["verfy", RUN], "no subcommand 'verfy'; the closest is 'verify'"),
        ([RUN, "--qiuck=1"], "no option '--qiuck'; the closest is 'quick'"),
        ([RUN, "-p", "mixup"], "takes no -p"),
        ([RUN, "runs/b"], "'runs/b' isn't expected here"),
    ],
)
def test_what_was_typed_wrong_is_told(argv, told, run, saved):
    """A wrong path is the most common mistake."""
    ran = run("checkpoints", *argv)

    assert ran.status == 2
    assert ran.err.startswith("UsageError: ")
    assert told in ran.err


@pytest.mark.parametrize("rest", [["--help"], ["list", "-h"], ["verify", "--help"],
                                  ["diff", "--help"]])  # fmt: skip
def test_help_says_how_it_is_written(rest, run, clean):
    """Plugins and settings don't matter here, and aren't mentioned."""
    ran = run("checkpoints", *rest)

    assert ran.status == 0
    assert ran.out.startswith("usage: eventloop checkpoints ")
    assert "--config" not in ran.out


def test_torch_and_the_task_stay_unimported(run_python, saved):
    """Listing and verifying take as long as Python and the disk do; the task may be gone."""
    Path("tiny.py").unlink()
    code = (
        "import sys; from eventloop.cli import main\n"
        f"main(['checkpoints', {RUN!r}]); main(['checkpoints', 'verify', {RUN!r}])\n"
        f"main(['export', {RUN!r}, 'model.safetensors'])\n"
        "print('torch' in sys.modules)"
    )

    done = run_python(code)

    assert done.stdout.endswith("False\n"), done.stderr
    assert Path("model.safetensors").exists()


def test_a_verified_run_has_exit_status_0(run, saved):
    """One line for each."""
    ran = run("checkpoints", "verify", RUN)

    assert ran == (0, f"{NEWEST}: verified\n{OLDER}: verified\n2 of 2 checkpoints verified\n", "")


def test_each_wrong_file_is_named_and_the_exit_status_is_4(run, saved):
    """Not only the first, so that one look is enough; scripts tell it from wrong usage."""
    flip_a_bit(NEWEST / "model.safetensors")
    (NEWEST / "rank0.json").unlink()
    flip_a_bit(NEWEST / "training.json")

    (row,) = as_json(run("checkpoints", "verify", str(NEWEST), "--json"), status=4)
    ran = run("checkpoints", "verify", RUN)

    assert row["verified"] is False
    assert [one.partition(": ")[0] for one in row["problems"]] == [
        "model.safetensors",
        "rank0.json",
        "training.json",
    ]
    assert ran.status == 4
    assert f"{NEWEST}: doesn't verify\n  model.safetensors: its bytes" in ran.out
    assert ran.out.endswith("1 of 2 checkpoints verified\n")


@pytest.mark.parametrize("break_it", [
    lambda: (NEWEST / "manifest.json").unlink(),
    lambda: flip_a_bit(NEWEST / "manifest.json"),
    lambda: NEWEST.rename(NEWEST.with_name("ba00000007")),
    lambda: (shutil.rmtree(NEWEST), NEWEST.symlink_to(OLDER.absolute())),
    lambda: (shutil.rmtree(NEWEST), NEWEST.touch()),
])  # fmt: skip
def test_a_broken_folder_is_found(break_it, run, saved):
    """No manifest, another one, another step's, a link, a file."""
    break_it()

    assert run("checkpoints", "verify", RUN).status == 4
    assert as_json(run("checkpoints", RUN, "--json"))[0]["verified"] is False


def test_a_checkpoint_equals_itself(run, saved):
    """The negative control of what follows."""
    ran = run("checkpoints", "diff", str(NEWEST), RUN)

    assert ran == (0, f"A  {NEWEST}\nB  {NEWEST}\nno difference\n", "")


def test_what_two_runs_differ_in_is_told_by_subject(run, saved):
    """Configuration, plugins, the lines of the task's file, tensors with the largest difference."""
    text = Path("tiny.py").read_text().replace("generator = torch", "generator  = torch")
    Path("tiny.py").write_text(text)
    run("fit", "tiny.py", "--no-plugins", "--run-dir", "b", "--seed", "3", "--task.lr", "0.2")

    found = as_json(run("checkpoints", "diff", RUN, "b", "--json"), status=1)
    ran = run("checkpoints", "diff", RUN, "b")

    told = {one["path"]: (one["a"], one["b"]) for one in found["configuration"]}
    assert told["settings/seed"] == ("0", "3")
    assert told["optimizers/sgd/groups/0/lr"] == ("'0.1'", "'0.2'")
    assert "task/source" not in told
    assert "-    generator = torch.Generator().manual_seed(0)" in found["task"]
    weights = {one["path"]: one for one in found["state"]}["model/0.weight"]
    first, second = (read_checkpoint(path).parts["model"]["0.weight"]
                     for path in (NEWEST, Path("b/checkpoints/ba00000006")))  # fmt: skip
    assert weights["largest"] == (first.double() - second.double()).abs().max().item()
    for part in ("configuration:\n", "\ntask:\n--- A\n", "\nfacts:\n", "\nstate:\n"):
        assert part in ran.out


def test_what_training_goes_on_from_can_be_compared_alone(run, saved):
    """The same run in another folder differs in what is told of it, and in nothing else."""
    run("fit", "tiny.py", "--no-plugins", "--run-dir", "b")

    told = as_json(run("checkpoints", "diff", RUN, "b", "--json"), status=1)

    assert [one["path"] for one in told["configuration"]] == ["settings/run_dir"]
    assert told["facts"] == told["task"] == told["state"] == []
    assert run("checkpoints", "diff", RUN, "b", "--state").status == 0


def test_what_is_of_one_run_by_its_nature_is_left_out_and_said(run, clean):
    """Ids and wall times hide a real difference otherwise; one that is left out is named."""
    for name, batch in (("a", 3), ("b", 3), ("c", 4)):
        state = {"of_this_run": {"id": EVIL + name}, "batch": batch}
        write_checkpoint(Path(name), {"plugins": {"it": {"version": "1", "state": state}}}, {})

    same, other = (run("checkpoints", "diff", "a", name, "--state") for name in "bc")
    found = as_json(run("checkpoints", "diff", "a", "b", "--json"))

    told = "left out, since no two runs share it: plugins/it/state/of_this_run\n"
    assert (same.status, other.status) == (0, 1)
    assert same.out.endswith(f"no difference\n{told}")
    assert "plugins/it/state/batch" in other.out
    assert other.out.endswith(told)
    assert (found["equal"], found["left_out"]) == (True, ["plugins/it/state/of_this_run"])


def test_plugins_are_compared_by_name(run, tiny, install):
    """One more of them moves no other."""
    install("bb-test", version="1.0")
    run("fit", "tiny.py", "--no-plugins", "-p", "bb-test", "--run-dir", "a")
    install("aa-test", version="2.0")
    run("fit", "tiny.py", "--no-plugins", "-p", "bb-test", "-p", "aa-test", "--run-dir", "b")

    told = as_json(run("checkpoints", "diff", "a", "b", "--json"), status=1)["plugins"]

    names = [one["path"].split("/")[:2] for one in told]
    assert ["plugins", "aa-test"] in names
    assert ["plugins", "bb-test"] not in names


def test_parts_that_only_one_has_are_told(run, clean):
    """A second rank, say."""
    write_checkpoint(Path("a"), {"model": {"w": torch.zeros(1)}}, {})
    write_checkpoint(Path("b"), {"model": {"w": torch.zeros(1)}, "rank1": {"n": 1}}, {})

    found = as_json(run("checkpoints", "diff", "a", "b", "--json"), status=1)

    assert found["state"] == [{"path": "rank1", "a": "not there", "b": "there", "largest": None}]


def test_a_damaged_checkpoint_is_not_compared(run, saved):
    """Of a run the newest that verifies stands in, and the one passed over is named."""
    flip_a_bit(NEWEST / "model.safetensors")

    named = run("checkpoints", "diff", str(NEWEST), str(OLDER))
    of_run = run("checkpoints", "diff", RUN, str(OLDER))

    assert (named.status, named.out) == (4, "")
    assert "model.safetensors: its bytes aren't those" in named.err
    assert of_run.status == 0
    assert of_run.err.startswith("ba00000006 isn't used: model.safetensors: its bytes")


def test_a_run_of_which_none_verifies_has_exit_status_4(run, saved):
    """With the reason for each."""
    for path in (NEWEST, OLDER):
        flip_a_bit(path / "model.safetensors")

    ran = run("checkpoints", "diff", RUN, RUN)

    assert ran.status == 4
    assert ran.err.startswith(
        f"CheckpointError: none of the 2 checkpoints in '{RUN}' can be used\n"
    )
    assert "ba00000003: model.safetensors" in ran.err


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


def test_a_narrow_terminal_gets_a_block_for_each(run, saved, monkeypatch):
    """Names cut into pieces can't be read or pasted."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")

    run("checkpoints", RUN)

    text = terminal.getvalue()
    assert text.startswith("checkpoint  ba00000006\nbatch       6\nepochs      2\nsaved")
    assert max(map(len, text.splitlines())) <= 40


def test_a_wide_terminal_gets_a_table(run, saved, monkeypatch):
    """A line for each checkpoint."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")

    run("checkpoints", RUN)

    assert len(terminal.getvalue().splitlines()) == 3


def test_a_long_wait_is_told_of(run, saved, monkeypatch):
    """Reading hundreds of gigabytes takes minutes, in which nothing else would be said."""
    monkeypatch.setattr("eventloop_checkpoints.list._SLOW_BYTES", 1000)

    assert "`--quick` compares sizes alone" in run("checkpoints", RUN).err
    assert run("checkpoints", RUN, "--quick").err == ""


def test_the_time_of_saving_may_be_unknown(run, saved):
    """It is the manifest's, of which there may be none."""
    (OLDER / "manifest.json").unlink()

    newest, older = as_json(run("checkpoints", RUN, "--json"))

    assert newest["saved"] is not None
    assert older["saved"] is None
    assert run("checkpoints", RUN).status == 0


@pytest.fixture
def removing(monkeypatch):
    """Removes a checkpoint, as a run under way does, when the first of its files is opened."""

    def removing(path, num_openings=1):
        opened, init = [], disk.OldFile.__init__

        def watched(file, at):
            opened.append(path == at.parent)
            if sum(opened) == num_openings:
                shutil.rmtree(path, ignore_errors=True)
            init(file, at)

        monkeypatch.setattr(disk.OldFile, "__init__", watched)

    return removing


@pytest.mark.parametrize("command", ["verify", "list"])
@pytest.mark.parametrize("gone", [NEWEST, OLDER])
def test_what_a_run_removes_meanwhile_is_not_damaged(command, gone, run, saved, removing):
    """A cron job that verifies runs under way would report a loss several times a day."""
    removing(gone)

    rows = as_json(run("checkpoints", command, RUN, "--json"))

    left = OLDER if gone == NEWEST else NEWEST
    assert [(row["checkpoint"], row["verified"]) for row in rows] == [(str(left), True)]


def test_what_a_run_removes_while_it_is_compared_is_looked_for_again(run, saved, removing):
    """The run has others by then."""
    shutil.copytree(RUN, "other")
    removing(NEWEST, num_openings=9)

    ran = run("checkpoints", "diff", RUN, "other", "--state", "--json")

    assert as_json(ran, 1)["a"] == str(OLDER)


def test_a_checkpoint_that_is_named_and_removed_meanwhile_is_not_there(run, saved, removing):
    """It can't be looked for again, but isn't damaged."""
    removing(NEWEST)

    ran = run("checkpoints", "verify", str(NEWEST))

    assert (ran.status, "ba00000006" in ran.err) == (2, True)
