"""TRL's and transformers' own tests of their trainers, with nothing changed but the loop.

    python tools/their_tests.py FOLDER tests/test_sft_trainer.py tests/test_dpo_trainer.py
    python tools/their_tests.py FOLDER tests/trainer/test_trainer.py

FOLDER is a clone of TRL's repository, or of transformers', of the version that is installed or near to it. Each
path runs twice: as it is, and with `on_eventloop` around each trainer. Models, tokenizers and data that the tests
download are made here, small, from configurations and by TRL's own script; tests that need others fail in both
runs. Prints how many pass, and what those raise that fail under ours alone. After `--timeout` seconds the tests
that are done count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tiny_models import write_for_transformers, write_for_trl

TRAINERS = ("SFT", "DPO", "Reward", "KTO", "RLOO", "GRPO")
# What needs no pictures, no GPU and no package that isn't here.
_FOR_HERE = "not VLM and not Vision and not Slow and not vllm and not liger"
# A refusal by name, in the messages of eventloop.
_REFUSALS = ("on eventloop's loop", "is a setting of eventloop's", "doesn't suit this trainer")
# Read by pytest before the tests import a trainer.
_NOTES = """
import json
def pytest_runtest_logreport(report):
    if report.when != "call" and report.passed:
        return
    why = getattr(report.longrepr, "reprcrash", None)
    why = why.message if why else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    kind = "error" if report.failed and report.when != "call" else report.outcome
    with open({results!r}, "a") as file:
        file.write(json.dumps([report.nodeid, kind, why]) + chr(10))
"""
_TRL = """
import importlib, sys
import datasets
from pathlib import Path

found = {{}}
datasets.Dataset.push_to_hub = lambda self, repo, config_name: found.__setitem__(config_name, self)
datasets.DatasetDict.push_to_hub = datasets.Dataset.push_to_hub
sys.path.append({scripts!r})
importlib.import_module("generate_zen_dataset").main(0.1, True, "zen")
load = datasets.load_dataset
def load_dataset(path, name=None, split=None, streaming=False, **more):
    if path != "trl-internal-testing/zen":
        return load(path, name, split=split, streaming=streaming, **more)
    whole, (part, _, until) = found[name], (split or "").partition("[:")
    rows = whole if split is None else whole[part]
    if until:
        rows = rows.select(range(int(until[:-1])))
    if not streaming:
        return rows
    if split is None:
        return datasets.IterableDatasetDict({{key: one.to_iterable_dataset() for key, one in rows.items()}})
    return rows.to_iterable_dataset()
datasets.load_dataset = load_dataset
if {ours}:
    import trl
    from eventloop_transformers import on_eventloop
    for name in {trainers!r}:
        setattr(trl, name + "Trainer", on_eventloop(getattr(trl, name + "Trainer")))
"""
_TRANSFORMERS = """
import transformers, transformers.trainer, transformers.trainer_seq2seq
if {ours}:
    from eventloop_transformers import on_eventloop
    transformers.Seq2SeqTrainer = on_eventloop(transformers.Seq2SeqTrainer)
    transformers.trainer_seq2seq.Seq2SeqTrainer = transformers.Seq2SeqTrainer
    transformers.Trainer = transformers.trainer.Trainer = on_eventloop(transformers.Trainer)
"""


def run(
    folder: Path, paths: list[str], ours: bool, timeout_s: float, hub: Path, only: str = ""
) -> dict[str, tuple[str, str]]:
    """Returns for each test what became of it, and why."""
    is_trl = (folder / "trl").is_dir()
    chosen = _FOR_HERE if is_trl else "not ray and not sigopt and not wandb"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        results = place / "results.jsonl"
        scripts = str(folder / "scripts")
        (place / "replaced_loop.py").write_text(
            (_TRL if is_trl else _TRANSFORMERS).format(
                ours=ours, trainers=TRAINERS, scripts=scripts
            )
            + _NOTES.format(results=str(results))
        )
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "replaced_loop", "-p", "no:cacheprovider", "-W", "ignore",
            f"--rootdir={folder}", "-c", os.devnull, "--import-mode=importlib", "-n", "0", "-m", "not slow",
            "-k", f"{chosen} and ({only})" if only else chosen, *[str(folder / one) for one in paths],
        ]  # fmt: skip
        path = os.pathsep.join((scratch, str(folder), os.environ.get("PYTHONPATH", "")))
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(hub), "HF_HUB_CACHE": str(hub / "hub"), "TQDM_DISABLE": "1",
        }  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=scratch, env=environment, timeout=timeout_s, check=False)
        return outcomes(results)


def outcomes(results: Path) -> dict[str, tuple[str, str]]:
    """Reads what became of each test: passed, failed, error or skipped, and the reason."""
    found = {}
    for line in results.read_text().splitlines():
        name, kind, why = json.loads(line)
        found[name] = (kind, next(iter(why.strip().splitlines()), "no message")[:300])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a clone of TRL's repository")
    parser.add_argument("paths", nargs="+", help="tests in it: tests/test_sft_trainer.py")
    parser.add_argument("--only", default="", help="of these tests, as pytest's -k takes it")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for each of both runs"
    )
    given = parser.parse_args()
    folder = given.folder.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        hub = Path(scratch)
        is_trl = (folder / "trl").is_dir()
        write_for_trl(hub, folder / "trl" / "chat_templates") if is_trl else write_for_transformers(
            hub
        )
        for path in given.paths:
            theirs, here = (
                run(folder, [path], ours, given.timeout, hub, given.only) for ours in (False, True)
            )
            report(path, theirs, here)


def report(path: str, theirs: dict[str, tuple[str, str]], here: dict[str, tuple[str, str]]) -> None:
    """Prints what became of the tests of a path."""
    done = [name for name in theirs if name in here]
    lost = sorted(name for name in done if theirs[name][0] == "passed" != here[name][0])
    refused = [name for name in lost if any(one in here[name][1] for one in _REFUSALS)]
    both = sum(theirs[name][0] == "passed" == here[name][0] for name in done)
    counted = Counter(kind for kind, _ in theirs.values())
    print(f"{path}: {len(theirs)} tests, {dict(counted)}; in time under both: {len(done)}")
    print(
        f"  pass under both: {both}; refused by name: {len(refused)}; other: {len(lost) - len(refused)}"
    )
    for name in lost:
        print(f"    {name}\n      {here[name][1]}")
    gained = [name for name in done if here[name][0] == "passed" != theirs[name][0]]
    print(f"  pass under ours alone: {len(gained)}")
    for name in gained:
        print(f"    {name}\n      {theirs[name][1]}")
    reasons = Counter(why[:150] for kind, why in theirs.values() if kind in ("failed", "error"))
    for why, num in reasons.most_common():
        print(f"  {num} fail under theirs: {why}")


if __name__ == "__main__":
    main()
