"""Models and tokenizers by name; references and passes are tested by the packages that build on them."""

from __future__ import annotations

import pytest
import torch
from sft_cases import SIZES, llama, tokenizer, with_adapters

from eventloop import TaskError
from eventloop_llm.models.passes import model_inputs
from eventloop_llm.models.pretrained import language_model, tokenizer_at, tokenizer_of


def test_what_is_saved_is_loaded(tmp_path):
    """With the template of a file in the place of its own."""
    llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "other.jinja").write_text("other")

    loaded, made = (
        language_model(str(tmp_path)),
        tokenizer_at(str(tmp_path), tmp_path / "other.jinja"),
    )

    torch.testing.assert_close(loaded.state_dict(), llama().state_dict(), rtol=0, atol=0)
    assert (made.chat_template, made.pad_token_id) == ("other", 0)


def test_a_model_or_tokenizer_that_is_not_there_is_named(tmp_path):
    """Also a tokenizer that has nothing to pad with."""
    with pytest.raises(TaskError, match="AutoTokenizer can't be loaded from"):
        tokenizer_of(str(tmp_path), None, None)
    with pytest.raises(TaskError, match=r"there is no folder './nothing'"):
        tokenizer_of("./nothing", None, None)
    with pytest.raises(TaskError, match="the model is a function, and there is no tokenizer"):
        tokenizer_of(llama, None, None)
    made = tokenizer()
    made.pad_token = made.eos_token = None
    with pytest.raises(TaskError, match="neither a pad_token nor an eos_token"):
        tokenizer_of(llama, made, None)


@pytest.mark.parametrize("make", [llama, with_adapters])
@pytest.mark.parametrize(("attention", "is_masked"), [("sdpa", True), ("eager", False)])
def test_a_mask_is_made_for_torchs_attention_alone(make, attention, is_masked):
    """Any other finds packed documents by their positions; adapters change nothing of that."""
    model = make()
    model.config._attn_implementation = attention
    batch = {
        name: torch.zeros(2, 3, dtype=torch.int64)
        for name in ("input_ids", "position_ids", "document_ids")
    }

    found = model_inputs(model, batch)

    assert ("attention_mask" in found) == is_masked
    assert found["use_cache"] is False
    assert "position_ids" in found


def test_a_mixture_of_experts_that_loses_by_its_load_gets_no_mask_for_pairs():
    """Its router's loss would fail with one; documents are found by their positions."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 2, "output_router_logits": True, "attn_implementation": "sdpa"}
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **experts))
    positions = torch.arange(3).expand(2, 3)
    batch = {"input_ids": positions, "position_ids": positions, "document_ids": positions * 0}

    outputs = model(**model_inputs(model, batch))

    assert outputs.aux_loss.isfinite()
