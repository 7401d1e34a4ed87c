"""TRL's own tests of its trainers, with nothing changed but the loop.

    python tools/their_tests.py FOLDER tests/test_sft_trainer.py tests/test_dpo_trainer.py

FOLDER is a clone of TRL's repository, of the version that is installed or near to it. Each path runs twice:
as it is, and with `on_eventloop` around each trainer. Models, tokenizers and data that the tests
download are made here, small, from configurations and by TRL's own script; tests that need others fail in both
runs. Prints how many pass, and what those raise that fail under ours alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

TRAINERS = ("SFT", "DPO", "Reward", "KTO", "RLOO", "GRPO")
# What needs no pictures, no GPU and no package that isn't here.
_FOR_HERE = "not VLM and not Vision and not Slow and not vllm and not liger"
# A refusal by name, in the messages of eventloop.
_REFUSALS = ("on eventloop's loop", "is a setting of eventloop's", "doesn't suit this trainer")
# Read by pytest before the tests import TRL.
_PLUGIN = """
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


def run(
    folder: Path, paths: list[str], ours: bool, timeout_s: float, hub: Path, only: str = ""
) -> dict[str, tuple[str, str]]:
    """Returns for each test what became of it, and why."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "replaced_loop.py").write_text(
            _PLUGIN.format(ours=ours, trainers=TRAINERS, scripts=str(folder / "scripts"))
        )
        results = place / "results.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "replaced_loop", "-p", "no:cacheprovider", "-W", "ignore",
            f"--rootdir={folder}", "-c", os.devnull, "--import-mode=importlib", "-n", "0", "-m", "not slow",
            "-k", f"{_FOR_HERE} and ({only})" if only else _FOR_HERE, f"--junitxml={results}",
            *[str(folder / one) for one in paths],
        ]  # fmt: skip
        path = os.pathsep.join((scratch, str(folder), os.environ.get("PYTHONPATH", "")))
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(hub), "HF_HUB_CACHE": str(hub / "hub"), "TQDM_DISABLE": "1",
        }  # fmt: skip
        subprocess.run(command, cwd=scratch, env=environment, timeout=timeout_s, check=False)
        return outcomes(results)


def write_models(hub: Path, templates: Path) -> None:
    """Writes the tiny models that the tests download most, where `from_pretrained` finds them offline."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bytes_and_words = Tokenizer(models.BPE())
    bytes_and_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_and_words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bytes_and_words.train_from_iterator([Path(__file__).read_text()], trainer)
    made = {
        "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "CausalLM", "qwen2_5"),
        "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "SequenceClassification", "qwen2_5"),
        "tiny-Qwen3ForCausalLM": ("Qwen3", "CausalLM", "qwen3"),
        "tiny-Qwen3ForSequenceClassification": ("Qwen3", "SequenceClassification", "qwen3"),
        "tiny-LlamaForCausalLM-3.2": ("Llama", "CausalLM", "llama3_2"),
        "tiny-LlamaForSequenceClassification-3.2": ("Llama", "SequenceClassification", "llama3_2"),
        "tiny-MistralForCausalLM-0.2": ("Mistral", "CausalLM", "qwen2_5"),
        "tiny-GPTNeoXForCausalLM": ("GPTNeoX", "CausalLM", None),
        "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "CausalLM", "qwen3"),
        "tiny-GptOssForCausalLM": ("GptOss", "CausalLM", None),
    }
    for name, (family, head, template) in made.items():
        place = hub / "hub" / f"models--trl-internal-testing--{name}"
        snapshot = place / "snapshots" / "0" / ""
        snapshot.mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bytes_and_words, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        if template is not None:
            tokenizer.chat_template = (templates / f"{template}.jinja").read_text()
        sizes = {
            "vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2,
        }  # fmt: skip
        if family in ("Qwen3Moe", "GptOss"):
            sizes |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        if head == "SequenceClassification":
            sizes["num_labels"] = 1
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes)
        model = getattr(transformers, f"{family}For{head}")(config).to(torch.bfloat16)
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)


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
            found[name] = (kind, (lines or ["no message"])[0][:300])
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
        write_models(hub, folder / "trl" / "chat_templates")
        for path in given.paths:
            theirs, here = (
                run(folder, [path], ours, given.timeout, hub, given.only) for ours in (False, True)
            )
            report(path, theirs, here)


def report(path: str, theirs: dict[str, tuple[str, str]], here: dict[str, tuple[str, str]]) -> None:
    """Prints what became of the tests of a path."""
    lost = sorted(name for name, (kind, _) in theirs.items() if kind == "passed" != here[name][0])
    refused = [name for name in lost if any(one in here[name][1] for one in _REFUSALS)]
    both = sum(kind == "passed" == here[name][0] for name, (kind, _) in theirs.items())
    counted = Counter(kind for kind, _ in theirs.values())
    print(f"{path}: {len(theirs)} tests, {dict(counted)}")
    print(
        f"  pass under both: {both}; refused by name: {len(refused)}; other: {len(lost) - len(refused)}"
    )
    for name in lost:
        print(f"    {name}\n      {here[name][1]}")
    gained = [name for name, (kind, _) in here.items() if kind == "passed" != theirs[name][0]]
    print(f"  pass under ours alone: {len(gained)}")
    for name in gained:
        print(f"    {name}\n      {theirs[name][1]}")
    reasons = Counter(why[:150] for kind, why in theirs.values() if kind in ("failed", "error"))
    for why, num in reasons.most_common():
        print(f"  {num} fail under theirs: {why}")


if __name__ == "__main__":
    main()
