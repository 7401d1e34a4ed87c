"""Runs Composer's own tests with our Trainer in the place of Composer's, and with Composer's.

Nothing of them is in this repository. They are in Composer's, of the version that is installed:

    git clone --depth 1 --branch v0.32.1 https://github.com/mosaicml/composer /tmp/composer
    python plugins/eventloop-composer/tools/their_tests.py /tmp/composer tests/algorithms tests/callbacks tests/loggers

Both run on the CPU, in one process, without the markers that Composer leaves out itself (gpu, remote,
daily). Prints how many pass, and what those raise that fail under ours alone or under both.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# Read by pytest before the tests import Composer. Its own folder comes after what is installed.
_PLUGIN = """
from eventloop_composer.importing import import_composer
import_composer()
import composer, composer.trainer, composer.trainer.trainer
if {ours}:
    from eventloop_composer import Trainer
    class Alone(Trainer):
        def __init__(self, model=None, settings=None, **given):
            if model is not None:
                given["model"] = model
            super().__init__(settings={{"autoload": False, **(settings or {{}})}}, **given)
    composer.Trainer = composer.trainer.Trainer = composer.trainer.trainer.Trainer = Alone
"""


def run(
    folder: Path, paths: list[str], ours: bool, timeout_s: float, left_out: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Returns for each test what became of it, and why."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "replaced_trainer.py").write_text(_PLUGIN.format(ours=ours))
        (place / "pytest.ini").write_text(_ini(folder))
        results = place / "results.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "replaced_trainer", "-c", str(place / "pytest.ini"),
            f"--rootdir={folder}", "-p", "no:cacheprovider", "--import-mode=append", "-n", "0",
            "--continue-on-collection-errors",
            "-m", "not gpu and not doctest and not daily and not remote", "--seed", "17",
            f"--junitxml={results}", *[str(folder / one) for one in paths],
            *[f"--deselect={one}" for one in left_out],
        ]  # fmt: skip
        path = os.pathsep.join((scratch, str(folder), os.environ.get("PYTHONPATH", "")))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=scratch, env=environment, timeout=timeout_s, check=False)
        return outcomes(results)


def write_tokenizers(folder: Path) -> None:
    """Writes stand-ins for the tokenizers that the tests download, where there is no network."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {
        "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]",
        "sep_token": "[SEP]", "bos_token": "[CLS]", "eos_token": "[SEP]",
    }  # fmt: skip
    words = [*dict.fromkeys(special.values()), *(f"word{idx}" for idx in range(200))]
    model = models.WordLevel({word: idx for idx, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    for name in ("bertt", "gpt2", "t5", "mptt", "t0pp"):
        made.save_pretrained(folder / "tests/assets/tokenizers" / name)


def outcomes(results: Path) -> dict[str, tuple[str, str]]:
    """Reads what pytest wrote: passed, failed, error or skipped, and the reason."""
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            found[name] = ("passed", "")
        else:
            kind = {"failure": "failed"}.get(problem.tag, problem.tag)
            lines = (problem.get("message") or problem.text or "no message").strip().splitlines()
            found[name] = (kind, (lines or ["no message"])[0][:200])
    return found


def _ini(folder: Path) -> str:
    """Returns Composer's own markers and filters, without the plugins that its options need."""
    text = (folder / "pyproject.toml").read_text()
    section = text.partition("[tool.pytest.ini_options]")[2].partition("\n[")[0]
    markers = re.search(r"markers = \[(.*?)\]", section, re.DOTALL)
    named = re.findall(r"""["'](.*?)["']\s*,?\s*$""", markers[1] if markers else "", re.MULTILINE)
    return "\n".join(
        [
            "[pytest]",
            "markers =",
            *(f"    {one}" for one in named),
            "filterwarnings =",
            "    ignore",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a clone of Composer's repository")
    parser.add_argument("paths", nargs="+", help="tests in it: tests/algorithms")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for each of both runs"
    )
    parser.add_argument("--deselect", action="append", default=[], help="a test to leave out")
    parser.add_argument(
        "--stand-ins", action="store_true", help="write tokenizers, which are downloaded otherwise"
    )
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.stand_ins:
        write_tokenizers(folder)
    theirs, here = (
        run(folder, given.paths, ours, given.timeout, given.deselect) for ours in (False, True)
    )
    for label, found in (("Composer's trainer", theirs), ("eventloop's", here)):
        counted = Counter(kind for kind, _ in found.values())
        print(f"{label}: {len(found)} tests, {dict(counted)}")
    lost = sorted(
        name for name, (kind, _) in theirs.items() if kind == "passed" and here[name][0] != "passed"
    )
    both = sum(kind == "passed" and here[name][0] == "passed" for name, (kind, _) in theirs.items())
    print(f"pass under both: {both}; under Composer's alone: {len(lost)}")
    for name in lost:
        print(f"  {name}\n    {here[name][1]}")
    gained = [
        name for name, (kind, _) in here.items() if kind == "passed" and theirs[name][0] != "passed"
    ]
    print(f"pass under ours alone: {len(gained)}")
    for name in gained:
        print(f"  {name}")
    failing = {
        name: why
        for name, (kind, why) in theirs.items()
        if kind in ("failed", "error") and here[name][0] != "passed"
    }
    print(f"fail under both: {len(failing)}")
    for name, why in sorted(failing.items(), key=lambda one: one[::-1]):
        print(f"  {name}\n    {why}")


if __name__ == "__main__":
    main()
