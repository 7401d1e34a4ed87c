"""Small models and tokenizers under the names that TRL's and transformers' tests download."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Name, family, head and chat template of TRL's.
_OF_TRL = (
    ("tiny-Qwen2ForCausalLM-2.5", "Qwen2", "CausalLM", "qwen2_5"),
    ("tiny-Qwen2ForSequenceClassification-2.5", "Qwen2", "SequenceClassification", "qwen2_5"),
    ("tiny-Qwen3ForCausalLM", "Qwen3", "CausalLM", "qwen3"),
    ("tiny-Qwen3ForSequenceClassification", "Qwen3", "SequenceClassification", "qwen3"),
    ("tiny-LlamaForCausalLM-3.2", "Llama", "CausalLM", "llama3_2"),
    ("tiny-LlamaForSequenceClassification-3.2", "Llama", "SequenceClassification", "llama3_2"),
    ("tiny-MistralForCausalLM-0.2", "Mistral", "CausalLM", "qwen2_5"),
    ("tiny-GPTNeoXForCausalLM", "GPTNeoX", "CausalLM", None),
    ("tiny-Qwen3MoeForCausalLM", "Qwen3Moe", "CausalLM", "qwen3"),
    ("tiny-GptOssForCausalLM", "GptOss", "CausalLM", None),
)
_BERTS = ("bert-base-cased", "bert-base-uncased", "google-bert/bert-base-uncased")


def write_for_trl(hub: Path, templates: Path) -> None:
    """Writes what TRL's tests download most, where `from_pretrained` finds it offline."""
    trained = _byte_pairs(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    for name, family, head, template in _OF_TRL:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        if template is not None:
            tokenizer.chat_template = (templates / f"{template}.jinja").read_text()
        more: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2}
        if family in ("Qwen3Moe", "GptOss"):
            more |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        if head == "SequenceClassification":
            more["num_labels"] = 1
        model = _model(family, head, len(tokenizer), **more).to(torch.bfloat16)
        _write(hub, f"trl-internal-testing/{name}", model, tokenizer)


def write_for_transformers(hub: Path) -> None:
    """Writes what transformers' tests of its trainer download most, likewise."""
    llamas = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs(["<unk>", "<s>", "</s>"]),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>",
    )  # fmt: skip
    model = _model("Llama", "CausalLM", len(llamas))
    _write(hub, "hf-internal-testing/tiny-random-LlamaForCausalLM", model, llamas)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.punctuation]
    words += [*string.ascii_letters, *(f"##{one}" for one in string.ascii_letters)]
    for name in _BERTS:
        berts = transformers.BertTokenizer(vocab={one: idx for idx, one in enumerate(words)})
        berts.model_max_length = 64
        model = _model("Bert", "SequenceClassification", len(berts), num_labels=2)
        _write(hub, name, model, berts)


def _byte_pairs(special: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of bytes and of what is frequent in this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return tokenizer


def _model(family: str, head: str, vocab_size: int, **more: Any) -> Any:
    """Returns a model of two layers and 8 numbers."""
    sizes = {
        "vocab_size": vocab_size, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **more)
    return getattr(transformers, f"{family}For{head}")(config)


def _write(hub: Path, name: str, model: Any, tokenizer: Any) -> None:
    place = hub / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0")
    model.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
