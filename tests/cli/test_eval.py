"""`eventloop eval`."""

from __future__ import annotations

import json


def test_metrics_are_a_table(run, tiny):
    """A row for each eval set and metric."""
    lines = run("eval", "tiny.py", "--no-plugins").out.splitlines()

    assert lines[-3].split() == ["eval", "set", "metric", "value"]
    assert [line.split()[:2] for line in lines[-2:]] == [
        ["test", "accuracy"],
        ["valid", "accuracy"],
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


def test_weights_that_do_not_exist_are_wrong_usage(run, tiny):
    """The check comes before the task is built."""
    ran = run("eval", "tiny.py", "--weights", "m.safetensors")

    assert ran.status == 2
    assert "there is no file 'm.safetensors'" in ran.err


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
