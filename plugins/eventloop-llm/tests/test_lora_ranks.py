"""Adapters on several ranks, whole and sharded."""

from __future__ import annotations

import pytest
import torch
from lora_cases import TARGETS, TOKENS, fit, last, llama, trainer_of
from safetensors.torch import load_file

from eventloop import EventloopError
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_fsdp import Fsdp
from eventloop_llm.lora import Lora
from eventloop_testing import run_ranks

STRATEGIES = {"ddp": list, "fsdp": lambda: [Fsdp()]}
OPTIONS = {"lora": {}, "dora": {"use_dora": True}, "head": {"modules_to_save": ["lm_head"]}}


def lora(**options):
    return Lora(**{"r": 2, "target_modules": TARGETS} | options)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_two_ranks_train_what_one_process_does(tmp_path, strategy, kind):
    """Adapters are sharded like the base, which takes part in no exchange of gradients."""
    alone = {"shuffle": False, "batch_size": 12, "export": tmp_path / "one-adapter"}
    fit(tmp_path / "one", lora(**OPTIONS[kind]), **alone)
    shared = {"shuffle": False, "batch_size": 6, "export": tmp_path / "two-adapter"}

    def train():
        fit(tmp_path / "two", lora(**OPTIONS[kind]), *STRATEGIES[strategy](), **shared)

    run_ranks(train)

    expected, actual = (
        load_file(tmp_path / f"{one}-adapter" / "adapter_model.safetensors")
        for one in ("one", "two")
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    saved = read_checkpoint(last(tmp_path / "two")).parts["model"]
    assert len(saved) == len(expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_go_on_with_the_same_bits(tmp_path, strategy):
    """And what they saved goes on in one process, whose base has the same digest."""
    plugins = lambda: [lora(lora_dropout=0.1), *STRATEGIES[strategy]()]  # noqa: E731
    expected = run_ranks(lambda: fit(tmp_path / "one", *plugins()))
    run_ranks(lambda: fit(tmp_path / "two", *plugins(), batch=1))

    actual = run_ranks(lambda: fit(tmp_path / "two", *plugins()))

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with trainer_of(tmp_path / "alone", lora(lora_dropout=0.1)) as trainer:
        trainer.load_weights(last(tmp_path / "two"))
        own = trainer.state.model.state_dict()
    saved = read_checkpoint(last(tmp_path / "two")).parts["model"]
    own = {name: own[name].cpu() for name in saved}
    torch.testing.assert_close(own, saved, rtol=0, atol=0)


@pytest.mark.nightly
def test_a_base_of_16_bits_is_sharded_with_adapters_of_32(tmp_path):
    """As large models are loaded; peft makes adapters of float32."""
    given = {"model": lambda: llama().bfloat16(), "precision": "bf16"}
    expected = run_ranks(lambda: fit(tmp_path / "one", lora(), Fsdp(), **given))
    run_ranks(lambda: fit(tmp_path / "two", lora(), Fsdp(), batch=3, **given))

    actual = run_ranks(lambda: fit(tmp_path / "two", lora(), Fsdp(), **given))

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert {one.dtype for one in actual[0].values()} == {torch.bfloat16, torch.float32}


@pytest.mark.nightly
def test_sharded_ranks_load_a_folder_and_refuse_to_merge(tmp_path):
    """Each reads its share of the adapter."""
    fit(tmp_path, lora(), export=tmp_path / "adapter")
    expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors")

    def again():
        with trainer_of(tmp_path / "two", lora(), Fsdp()) as trainer:
            trainer.load_weights(tmp_path / "adapter")
            trainer.export(tmp_path / "again")

    def merging(name):
        with trainer_of(tmp_path / "three", lora(merge=True), Fsdp()) as trainer:
            trainer.load_weights(tmp_path / "adapter")
            try:
                trainer.export(tmp_path / name)
            except EventloopError as error:
                return str(error)

    run_ranks(again)
    for name in ("merged", "merged.safetensors"):
        assert "can't be merged" in run_ranks(merging, name)[0]
    actual = load_file(tmp_path / "again" / "adapter_model.safetensors")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def generated(folder, *plugins):
    """Returns what the model generates after a fit, outside of its forward pass."""
    with trainer_of(folder, *plugins, max_duration="1ba") as trainer:
        trainer.fit()
        model = trainer.state.model.eval()
        tokens = TOKENS[:2].to(trainer.state.device)
        return model.generate(input_ids=tokens, max_new_tokens=3, pad_token_id=0).cpu()


@pytest.mark.nightly
@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_sharded_ranks_generate(tmp_path, task_type):
    """A model of peft calls the forward pass of the base model, not its own, which gathers."""
    whole, sharded = (
        run_ranks(lambda: generated(tmp_path / name, lora(task_type=task_type), *strategy()))
        for name, strategy in STRATEGIES.items()
    )

    assert torch.equal(sharded[0], whole[0])
    assert torch.equal(sharded[1], whole[0])


@pytest.mark.nightly
def test_a_rank_with_another_base_is_noticed(tmp_path):
    """Control: the base of the resumed ranks is compared, shards and all."""
    run_ranks(lambda: fit(tmp_path, lora(), Fsdp(), batch=1))

    def other():
        try:
            fit(tmp_path, lora(), Fsdp(), model=lambda: llama(4))
        except EventloopError as error:
            return str(error)

    assert "differ from the weights that it leaves out" in run_ranks(other)[1]
