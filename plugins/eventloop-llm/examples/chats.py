"""Chats about Python's own functions: a tiny Llama learns to say what a function is for.

python -m pip install . "./plugins/eventloop-llm[lora]"
eventloop fit plugins/eventloop-llm/examples/chats.py
eventloop fit plugins/eventloop-llm/examples/chats.py --task.packing true
eventloop fit plugins/eventloop-llm/examples/chats.py --lora.r 8 --lora.target_modules '["q_proj", "v_proj"]'

Model and tokenizer are made from a configuration and from Python's sources, so that nothing is downloaded:
the folder has them and the data as `eventloop fit eventloop_llm.sft --task.model FOLDER/model --task.data
FOLDER/chats.jsonl` takes them. `python plugins/eventloop-llm/examples/chats.py` makes them alone.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

import eventloop_llm.sft
from eventloop import Task, rank_zero_first

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest")
TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_tokenizer(num_tokens: int = 1024):
    """A byte-level BPE, trained on sources of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator((text for _, text in sources()), trainer)
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE, **special)


def make_model(tokenizer, width: int = 64, depth: int = 2):
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.set_rng_state(generator_state)
    return model


def sources() -> Iterator[tuple[str, str]]:
    """The files of some packages of the standard library: the module's name, and its text."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for file in sorted((stdlib / package).glob("*.py")):
            yield f"{package}.{file.stem}", file.read_text(encoding="utf-8", errors="replace")


def functions() -> list[tuple[str, str]]:
    """Functions and classes, each with the first sentence of its docstring."""
    found = {}
    for module, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                line = (ast.get_docstring(node) or "").partition("\n")[0].strip()
                if 20 <= len(line) <= 80:
                    found.setdefault(line, f"{module}.{node.name}")
    return [(name, line) for line, name in found.items()]


def chats() -> list[dict]:
    """A chat for each function."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {name} for?"},
                {"role": "assistant", "content": line},
            ]
        }
        for name, line in functions()
    ]


def pairs() -> list[dict]:
    """A pair for each function: what it is for, and the same words in the reverse order."""
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": [
                {
                    "role": "assistant",
                    "content": " ".join(reversed(row["messages"][1]["content"].split())),
                }
            ],
        }
        for row in chats()
    ]


def write_lines(path: Path, rows: list[dict]) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(folder: Path) -> None:
    """Writes model, tokenizer and data, unless they are there."""
    with rank_zero_first():
        if (folder / "ready").exists():
            return
        tokenizer = make_tokenizer()
        for made in (tokenizer, make_model(tokenizer)):
            made.save_pretrained(folder / "model")
        for name, rows in {"chats": chats(), "pairs": pairs()}.items():
            write_lines(folder / f"{name}.jsonl", rows[::8] + rows[1::8] + rows[2::8])
            write_lines(folder / f"eval-{name}.jsonl", rows[3::8][:64])
        (folder / "ready").touch()


def task(folder: Path = Path("chats"), lr: float = 3e-3, packing: bool = False) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        folder: where model and data are, or are written.
        lr: highest learning rate.
        packing: whether several chats share a row.
    """
    prepare(folder)
    return eventloop_llm.sft.task(
        str(folder / "model"),
        folder / "chats.jsonl",
        eval_data=folder / "eval-chats.jsonl",
        max_length=128,
        packing=packing,
        batch_size=4 if packing else 16,
        lr=lr,
        max_new_tokens=24,
    )


if __name__ == "__main__":
    prepare(Path("chats"))
