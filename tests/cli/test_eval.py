"""`eventloop eval`."""

from __future__ import annotations

import json


def test_metrics_are_a_table(run, tiny):
    """A row for each eval set and metric."""
    lines = run("eval", "tiny.py", "--no-plugins").out.splitlines()

    assert lines[-5].split() == ["eval", "set", "metric", "value"]
    assert [line.split()[:2] for line in lines[-4:]] == [
        ["test", "accuracy"],
        ["test", "loss"],
        ["valid", "accuracy"],
        ["valid", "loss"],
    ]


def test_json_is_all_that_is_printed(run, tiny):
    """Scripts read it."""
    metrics = json.loads(run("eval", "tiny.py", "--no-plugins", "--json").out)

    assert list(metrics) == ["test", "valid"]
    assert 0 <= metrics["test"]["accuracy"] <= 1


def test_exported_weights_are_evaluated(run, tiny):
    """They give what the run gave at its end."""
    fit = run("fit", "tiny.py", "--no-plugins", "--export", "m.safetensors", "--task.lr", "1.0")

    metrics = json.loads(
        run("eval", "tiny.py", "--no-plugins", "--json", "--weights", "m.safetensors").out
    )

    assert f"test/accuracy {metrics['test']['accuracy']:.4g}" in fit.out


def test_a_run_is_evaluated_though_it_was_begun_otherwise(run, tiny):
    """The flag that the refusal names is one that the command knows."""
    fit = run("fit", "tiny.py", "--no-plugins", "--run-dir", "there", "--max-duration", "2ep")
    argv = ("eval", "tiny.py", "--no-plugins", "--json", "--run-dir", "there")

    assert "`--allow-config-change`" in run(*argv, "--max-duration", "3ep").err
    metrics = json.loads(run(*argv, "--max-duration", "3ep", "--allow-config-change").out)

    assert f"test/accuracy {metrics['test']['accuracy']:.4g}" in fit.out


def test_a_checkpoint_that_does_not_verify_is_not_evaluated(run, tiny):
    """Its exit status is told from that of a run that failed."""
    run("fit", "tiny.py", "--no-plugins", "--run-dir", "run")
    folder = tiny / "run" / "checkpoints" / "ba00000006"
    (folder / "model.safetensors").write_bytes(b"")

    ran = run("eval", "tiny.py", "--no-plugins", "--weights", str(folder))

    assert ran.status == 4
    assert "model.safetensors: it has 0 bytes" in ran.err


def test_a_task_without_eval_data_is_told(run, tiny):
    """An empty table would look like a result."""
    code = (tiny / "tiny.py").read_text().replace("eval_dataloaders", "#")
    (tiny / "bare.py").write_text(code)

    ran = run("eval", "bare.py", "--no-plugins")

    assert ran.status == 1
    assert "bare.py has no eval data" in ran.err


def test_json_is_json_whatever_a_plugin_prints(run, tiny, install):
    """A program reads the metrics."""
    hook = "    @hookimpl\n    def eval_start(self): print('evaluating')\n"
    install("aa-test", f"print('hello')\nfrom eventloop import hookimpl\nclass Plugin:\n{hook}")

    ran = run("eval", "tiny.py", "--json", "--no-plugins", "-p", "aa-test")

    assert set(json.loads(ran.out)) == {"test", "valid"}
    assert "hello" in ran.err
    assert "evaluating" in ran.err


def test_the_best_checkpoint_is_marked_in_the_list(run, followed):
    """In the table, and for programs."""
    lines = run("checkpoints", "there").out.splitlines()
    rows = json.loads(run("checkpoints", "there", "--json").out)

    assert lines[0].split()[6] == "best"
    assert ["  best  " in line for line in lines[1:]] == [False, True]
    assert [(row["batch"], row["best"]) for row in rows] == [(6, False), (3, True)]


def test_a_run_that_kept_no_weights_says_how_to_keep_them(run, tiny):
    """Hours of training would be gone with the process."""
    hint = "no weights were kept: `--run-dir FOLDER`"
    argv = ("fit", "tiny.py", "--no-plugins")

    assert hint in run(*argv).out
    for kept in (["--export", "m.safetensors"], ["--run-dir", "kept"], ["--dry-run"]):
        assert hint not in run(*argv, *kept).out


def test_a_fit_says_with_which_weights_its_test_sets_were_evaluated(run, tiny):
    """They aren't those of the numbers before them on the line."""
    file = tiny / "tiny.py"
    text = file.read_text()
    assert "        eval_dataloaders=" in text
    given = "        test_dataloaders={'last': loader},\n        eval_dataloaders="
    file.write_text(text.replace("        eval_dataloaders=", given))
    argv = ("fit", "tiny.py", "--no-plugins", "--run-dir")

    best = run(*argv, "best", "--checkpoint-best", "max test/loss").out
    assert "test sets: with the weights of ba00000003, the best" in best
    assert "test sets" not in run(*argv, "last").out
