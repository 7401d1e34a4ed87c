"""Models and tokenizers of transformers, from a folder or the Hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from eventloop import TaskError
from eventloop.toolbox import one_line

Dtype = Literal["float32", "bfloat16", "auto"]


def language_model(name: str, *, dtype: Dtype = "float32", **options: Any) -> nn.Module:
    """Loads a causal language model.

    Args:
        name: a folder that `save_pretrained` wrote, or a name on the Hub.
        dtype: dtype of its weights; "auto": as saved.
        options: further arguments of `from_pretrained`.

    Raises:
        TaskError: there is no such model.
    """
    from transformers import AutoModelForCausalLM

    model: nn.Module = loaded(AutoModelForCausalLM, name, dtype=dtype, **options)
    return model


def tokenizer_at(name: str, chat_template: Path | None = None) -> Any:
    """Loads a tokenizer.

    Args:
        name: the model's folder or name.
        chat_template: a file with a template that replaces the tokenizer's.

    Raises:
        TaskError: there is no such tokenizer, or it has neither a padding token nor an end-of-text token.
    """
    tokenizer = named_tokenizer(name)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return with_padding(tokenizer)


def with_padding(tokenizer: Any) -> Any:
    """Makes a tokenizer pad with its end-of-text token, if it has no padding token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise TaskError(
                "the tokenizer has neither a pad_token nor an eos_token",
                fix='set one where it is made: tokenizer.pad_token = "<pad>"',
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_maker(model: str | Callable[[], nn.Module], dtype: Dtype) -> Callable[[], nn.Module]:
    """Returns a function that loads or builds the model."""
    return partial(language_model, model, dtype=dtype) if isinstance(model, str) else model


def tokenizer_of(model: Any, tokenizer: Any, chat_template: Path | None) -> Any:
    """Returns the named tokenizer, or the tokenizer in the model's folder."""
    source = model if tokenizer is None else tokenizer
    if isinstance(source, str | Path):
        return tokenizer_at(str(source), chat_template)
    if tokenizer is None:
        raise TaskError(
            "the model is a function, and there is no tokenizer", fix="give task(tokenizer=...)"
        )
    return with_padding(tokenizer)


def named_tokenizer(tokenizer: Any) -> Any:
    """Loads a tokenizer by path or name; anything that isn't a string is returned unchanged.

    Raises:
        TaskError: there is no such tokenizer.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer

    return loaded(AutoTokenizer, tokenizer)


def loaded(kind: Any, name: str, **options: Any) -> Any:
    """Calls `from_pretrained` of a class of transformers; raises a TaskError if loading fails."""
    is_folder = Path(name).is_dir()
    # Names on the Hub have at most a single slash: report a missing folder without asking the Hub.
    if not is_folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise TaskError(
            f"there is no folder {name!r}", fix="name a folder that save_pretrained wrote"
        )
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        about = "" if is_folder else ", which is no folder here"
        raise TaskError(
            f"{kind.__name__} can't be loaded from {name!r}{about}: "
            + one_line(" ".join(str(error).split()), 300),
            fix="name a folder that save_pretrained wrote",
        ) from error
