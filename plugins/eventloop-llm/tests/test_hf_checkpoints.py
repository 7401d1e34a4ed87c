"""Folders of save_pretrained: they load in transformers, whenever the run ends, and wherever they are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
import torch
from run_cases import Ends
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from eventloop import PluginError, Task
from eventloop_fsdp import Fsdp
from eventloop_llm.hf_checkpoints import HfCheckpoints
from eventloop_llm.models import folder_writer
from eventloop_testing import check_plugin, isolated_trainer, run_ranks

TOKENS = torch.randint(3, 32, (24, 6), generator=torch.Generator().manual_seed(0))


def llama(**more):
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
            } | more
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3)
    return model


def tied():
    return llama(tie_word_embeddings=True)


def half():
    return AutoModelForCausalLM.from_config(llama().config, dtype=torch.bfloat16)


def gpt2():
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))


def tokenizer():
    names = ["<pad>", "<bos>", "<eos>", *(f"w{idx}" for idx in range(29))]
    made = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(names)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def task(model=llama, batch_size=4):
    data = [{"input_ids": one, "labels": one} for one in TOKENS]
    return Task(
        model=model,
        train_dataloader=lambda: torch.utils.data.DataLoader(data, batch_size),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )


def fit(place, plugin, *algorithms, model=llama, batch=None, batch_size=4, **given):
    """Trains; returns the model."""
    given = {"max_duration": "6ba", "checkpoint_interval": "1ba", "checkpoint_keep": 2} | given
    watchers = [plugin] if plugin is not None else []
    with (
        contextlib.suppress(EOFError),
        isolated_trainer(
            place, task(model, batch_size), algorithms=[*algorithms, Ends(batch)], callbacks=watchers,
            **given,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit()
    return trainer.state.model


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS[:3]).logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [llama, tied, half, gpt2])
def test_folders_load_in_transformers(tmp_path, model):
    """Weights, configuration, generation and tokenizer; all checkpoints, also those that are gone."""
    plugin = HfCheckpoints(tokenizer=tokenizer(), max_shard_size="8KB")
    trained = fit(tmp_path, plugin, model=model).cpu()
    folder = tmp_path / "run" / "hf"

    loaded = AutoModelForCausalLM.from_pretrained(folder / "ba00000006")

    assert names(folder) == [f"ba{idx:08}" for idx in range(7)]
    assert loaded.dtype == trained.dtype
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(logits(loaded), logits(trained), rtol=0, atol=1e-6)
    assert loaded.generation_config.max_new_tokens == trained.generation_config.max_new_tokens
    assert AutoTokenizer.from_pretrained(folder / "ba00000006")("w1 w2")["input_ids"] == [4, 5]
    index = json.loads((folder / "ba00000006" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    first = AutoModelForCausalLM.from_pretrained(folder / "ba00000001")
    assert not torch.equal(logits(first), logits(loaded))
    theirs = tmp_path / "theirs"
    trained.save_pretrained(theirs, max_shard_size="8KB")
    assert {one.name for one in theirs.iterdir()} <= set(names(folder / "ba00000006"))
    ours, config = (
        json.loads((one / "config.json").read_text()) for one in (folder / "ba00000006", theirs)
    )
    assert ours == config


def test_the_interval_counts_batches_and_the_last_is_always_there(tmp_path):
    """One checkpoint of each four batches, and the end of the fit."""
    fit(tmp_path, HfCheckpoints(interval="4ba"))

    assert names(tmp_path / "run" / "hf") == ["ba00000004", "ba00000006"]


def test_a_slow_disk_changes_neither_the_interval_nor_the_last_folder(tmp_path, monkeypatch):
    """The last checkpoint is saved twice, by the interval and by the end, while folders wait to be written."""
    write = folder_writer.write_folder

    def slowly(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(folder_writer, "write_folder", slowly)
    plugin = HfCheckpoints(interval="4ba")

    fit(tmp_path, plugin, checkpoint_interval="1ba", max_duration="8ba")

    assert names(tmp_path / "run" / "hf") == ["ba00000004", "ba00000008"]


def test_the_newest_stay(tmp_path):
    """As many as `keep` says, in a folder of one's own."""
    fit(tmp_path, HfCheckpoints(folder=tmp_path / "models", keep=2))

    assert names(tmp_path / "models") == ["ba00000005", "ba00000006"]


def test_a_run_changes_nothing_by_it(tmp_path):
    """It only watches."""
    plain = fit(tmp_path / "plain", None).state_dict()

    torch.testing.assert_close(
        fit(tmp_path / "with", HfCheckpoints()).state_dict(), plain, rtol=0, atol=0
    )


def test_what_a_kill_kept_from_being_written_is_written(tmp_path):
    """Of the checkpoints that are still there; half a folder is removed."""
    fit(tmp_path, HfCheckpoints(), batch=4)
    folder = tmp_path / "run" / "hf"
    (folder / "ba00000003").rename(folder / ".new-ba00000003")
    (folder / ".of-ba00000003").mkdir()

    fit(tmp_path, HfCheckpoints())

    assert names(folder) == [f"ba{idx:08}" for idx in range(7)]
    for one in (3, 4):  # checkpoints that had no folder when the run ended
        AutoModelForCausalLM.from_pretrained(folder / f"ba{one:08}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_write_one_folder(tmp_path, strategy):
    """Rank 0, of what all ranks have saved; slices are joined."""

    def train():
        more = [Fsdp()] if strategy == "fsdp" else []
        fit(tmp_path, HfCheckpoints(interval="6ba"), *more, batch_size=2)

    run_ranks(train)
    one = fit(tmp_path / "one", None).cpu()

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf" / "ba00000006")
    torch.testing.assert_close(logits(loaded), logits(one), rtol=0, atol=2e-5)


def test_a_store_has_the_same_folders(tmp_path):
    """And forgets those that don't stay."""
    fit(tmp_path, HfCheckpoints(store="memory://models/a", keep=2, tokenizer=tokenizer()))
    files = fsspec.filesystem("memory")

    found = {one["name"].rpartition("/")[2] for one in files.ls("/models/a", detail=True)}
    assert found == {"ba00000005", "ba00000006"}
    files.get("/models/a/ba00000006", str(tmp_path / "got"), recursive=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "got")
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf" / "ba00000006")
    torch.testing.assert_close(logits(loaded), logits(local), rtol=0, atol=0)
    files.rm("/models", recursive=True)


def test_a_run_at_a_url_writes_folders_of_its_local_copies(tmp_path):
    """A copy of the last checkpoint is on this machine."""
    url, folder = f"memory:/{tmp_path}/run", tmp_path / "hf"

    trained = fit(tmp_path, HfCheckpoints(folder=folder, interval="3ba"), run_dir=url).cpu()

    assert names(folder) == ["ba00000003", "ba00000006"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "ba00000006")
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)


def test_a_model_that_is_not_one_of_transformers_is_refused(tmp_path):
    """When the trainer is built, with what to do."""
    with pytest.raises(PluginError, match="Linear isn't a model of transformers"):
        fit(tmp_path, HfCheckpoints(), model=lambda: torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"interval": "2ep"}, "interval='2ep' isn't in batches"),
        ({"keep": 0}, "keep=0 is not an int of 1 or more"),
        ({"store": "bucket"}, "it is not a URL"),
    ],
)
def test_options_that_can_not_be_are_refused(options, shown):
    """With the value that was seen."""
    with pytest.raises(ValueError, match=shown):
        HfCheckpoints(**options)


@pytest.mark.nightly
def test_it_keeps_the_contract_of_plugins():
    """Options, roles, state and resume, as of every plugin."""
    check_plugin(HfCheckpoints, role="callback", options={"keep": 1}, task=task)


SCRIPT = """
import sys
from eventloop_composer.importing import declare_operators
declare_operators()  # as plugins/conftest.py does: beside Composer there is a torchvision for CUDA
sys.path.insert(0, {tests!r})
from test_hf_checkpoints import HfCheckpoints, fit
from pathlib import Path
fit(Path({place!r}), HfCheckpoints(), max_duration="60ba", checkpoint_keep=None)
"""


@pytest.mark.nightly
def test_kills_leave_whole_folders(tmp_path):
    """Wherever a process ends, each folder loads; in the end all are there."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), place=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    folder = tmp_path / "run" / "hf"
    kills = 0
    for idx in range(40):
        process = subprocess.Popen([sys.executable, "-c", script], env=environment)
        before = len([*folder.glob("ba*")]) if folder.is_dir() else 0
        while process.poll() is None:
            now = len([*folder.glob("ba*")]) if folder.is_dir() else 0
            if now >= before + 6 and kills < 6:
                time.sleep(0.003 * (idx % 7))
                process.send_signal(signal.SIGKILL)
                kills += 1
                process.wait()
        for one in folder.glob("ba*"):
            AutoModelForCausalLM.from_pretrained(one)
        if process.returncode == 0:
            break

    assert kills == 6
    assert names(folder) == [f"ba{one:08}" for one in range(61)]
