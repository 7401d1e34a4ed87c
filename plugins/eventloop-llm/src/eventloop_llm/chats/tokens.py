"""From rows to token ids and labels: chat templates, and the tokens that a loss covers."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from eventloop import TaskError
from eventloop.toolbox import one_line
from eventloop_llm.packing import IGNORED

LossOn = Literal["auto", "assistant", "completion", "all"]
Span = tuple[int, int]
T = TypeVar("T")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NEEDED = "give rows of messages, of prompt and completion, of text, or of input_ids"


@dataclass(frozen=True)
class Example:
    """A row as tokens.

    Args:
        input_ids: token ids of the whole row.
        labels: as many labels; `IGNORED` where a token isn't trained on.
    """

    input_ids: list[int]
    labels: list[int]

    def cut_to(self, max_length: int) -> Example:
        """Returns the example truncated to its first tokens."""
        return Example(self.input_ids[:max_length], self.labels[:max_length])


@dataclass(frozen=True)
class Conversations:
    """Makes token ids and labels of rows.

    Args:
        tokenizer: a fast tokenizer of transformers.
        loss_on: "assistant": the assistants' messages, as the chat template marks them
            (`{% generation %}`), or found by rendering the chat up to each turn; "completion": the completion, or the last
            message; "all" tokens; "auto": assistants in messages, the completion of a prompt, all of a
            text.
    """

    tokenizer: Any
    loss_on: LossOn = "auto"

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Returns a row's token ids and labels.

        Raises:
            ValueError: the row has an unknown format, or its chat can't be rendered message by message.
        """
        if "input_ids" in row:
            ids = [int(token) for token in row["input_ids"]]
            return Example(ids, [int(label) for label in row.get("labels", ids)])
        if "messages" in row:
            return self._of_messages(row["messages"], row.get("tools"))
        if "prompt" in row and "completion" in row:
            prompt = row["prompt"]
            completion = row["completion"]
            if isinstance(prompt, str):
                return self._of_texts(prompt, completion)
            return self._example(prompt, completion, row.get("tools"))
        if "text" in row:
            return self._of_texts("", row["text"], "all")
        raise ValueError(f"it has {', '.join(map(repr, row)) or 'nothing'}; {_NEEDED}")

    def prompt_and_answer(self, row: Mapping[str, Any]) -> tuple[list[int], str] | None:
        """Returns the token ids up to the last answer, and the answer; None if the row has no answer."""
        prompt = row.get("prompt")
        answer = row.get("completion")
        if "messages" in row and row["messages"][-1]["role"] == "assistant":
            prompt = row["messages"][:-1]
            answer = row["messages"][-1:]
        if not prompt or answer is None:
            return None
        text = answer if isinstance(prompt, str) else answer[-1].get("content", "")
        return self.prompt_ids(prompt, row.get("tools")), str(text)

    def prompt_ids(self, prompt: str | Sequence[Any], tools: Any = None) -> list[int]:
        """Returns the ids of a text, or of messages with the header of an assistant's answer."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return self._ids(self._rendered(prompt, tools, add_generation_prompt=True))

    def _of_messages(self, messages: Sequence[Any], tools: Any) -> Example:
        if self.loss_on == "completion":
            return self._example(messages[:-1], messages[-1:], tools)
        text = self._rendered(messages, tools)
        if self.loss_on == "all":
            ids = self._ids(text)
            return Example(ids, list(ids))
        return self._trained_on(text, self._assistant_spans(messages, tools, text))

    def _example(self, prompt: Sequence[Any], completion: Sequence[Any], tools: Any) -> Example:
        messages = [*prompt, *completion]
        if self.loss_on in ("assistant", "all"):
            return self._of_messages(messages, tools)
        text = self._rendered(messages, tools)
        rendered_prompt = self._rendered(prompt, tools, add_generation_prompt=True)
        # The longest common prefix, because a template may render the end of the prompt otherwise.
        start = len(os.path.commonprefix([text, rendered_prompt]))  # noqa: RUF071  texts, not paths
        return self._trained_on(text, [(start, len(text))])

    def _of_texts(self, prompt: str, completion: str, loss_on: str = "") -> Example:
        end = self.tokenizer.eos_token or ""
        text = prompt + completion + ("" if completion.endswith(end) else end)
        tokens = self.tokenizer(text, return_offsets_mapping=True)
        ids = list(tokens["input_ids"])
        if "all" in (loss_on, self.loss_on):
            return Example(ids, list(ids))
        if self.loss_on == "assistant":
            raise ValueError("it is a text without messages, where no assistant speaks")
        return _labelled(ids, tokens["offset_mapping"], [(len(prompt), len(text))])

    def _assistant_spans(self, messages: Sequence[Any], tools: Any, text: str) -> list[Span]:
        """Returns the character spans of assistants in a rendered chat."""
        template = str(self.tokenizer.get_chat_template(tools=tools))
        if _MARKS.search(template):
            return self._marked_spans(messages, tools, template)
        spans = []
        for idx, message in enumerate(messages):
            if message["role"] == "assistant":
                rendered_prompt = self._rendered(messages[:idx], tools, add_generation_prompt=True)
                up_to = self._rendered(messages[: idx + 1], tools)
                if not (text.startswith(up_to) and up_to.startswith(rendered_prompt)):
                    raise ValueError(
                        f"its template renders the chat up to message {idx} otherwise than in the whole "
                        "chat; mark what assistants say in it, {% generation %}...{% endgeneration %}, or "
                        "train on the last message alone, loss_on='completion'"
                    )
                spans.append((len(rendered_prompt), len(up_to)))
        if not spans:
            raise ValueError("no message in it is an assistant's")
        return spans

    def _marked_spans(self, messages: Sequence[Any], tools: Any, template: str) -> list[Span]:
        # Slow to import, and plugins that are off import this module.
        from transformers.utils.chat_template_utils import render_jinja_template

        # The token mask of `apply_chat_template` continues to the end of the chat if a mark ends with a
        # space (transformers 5.23).
        _, (spans,) = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if not spans:
            raise ValueError("no message in it is an assistant's, as its template marks them")
        return [(start, end) for start, end in spans]

    def _rendered(self, messages: Sequence[Any], tools: Any, **options: Any) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "it is a chat, and the tokenizer has no chat template; name a file with "
                "one, chat_template=FILE"
            )
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, **options
        )
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _trained_on(self, text: str, spans: list[Span]) -> Example:
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _labelled(list(tokens["input_ids"]), tokens["offset_mapping"], spans)


def examples_of(
    rows: Sequence[Mapping[str, Any]], name: str, conversations: Conversations, max_length: int
) -> tuple[list[Example], int, int]:
    """Makes examples of rows; those longer than `max_length` are cut at their end.

    Args:
        name: name of the data, for errors.

    Returns:
        The examples, the number of truncated ones, and the number dropped because no label was left.

    Raises:
        TaskError: a row can't be used; the message has its number.
    """
    examples = made_of_rows(rows, name, conversations)
    num_cut = sum(len(example.input_ids) > max_length for example in examples)
    cut_examples = [example.cut_to(max_length) for example in examples]
    labelled = [example for example in cut_examples if has_label(example)]
    require_some(labelled, name, max_length)
    return labelled, num_cut, len(examples) - len(labelled)


def made_of_rows(
    rows: Sequence[Mapping[str, Any]], name: str, make: Callable[[Mapping[str, Any]], T]
) -> list[T]:
    """Calls a function for each row; adds the row's number to its errors."""
    results = []
    for number, row in enumerate(rows):
        try:
            results.append(make(row))
        except (ValueError, TypeError, KeyError) as error:
            raise TaskError(
                f"row {number} of {name} can't be trained on: {one_line(str(error), 400)}",
                row=one_line(repr(row), 200),
                fix="change the row, or leave it out",
            ) from error
    return results


def has_label(example: Example) -> bool:
    """Whether any token of an example is trained on; the first has no preceding token to predict it from."""
    return any(label != IGNORED for label in example.labels[1:])


def require_some(examples: Sequence[Any], name: str, max_length: int) -> None:
    """Raises a TaskError if no example is left."""
    if not examples:
        raise TaskError(
            f"no row of {name} has a label in its first {max_length} tokens",
            fix="raise max_length, or train on more, loss_on='all'",
        )


def _labelled(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> Example:
    """Keeps the labels of tokens that overlap with a span; spans are sorted."""
    labels = []
    remaining = list(reversed(spans))
    for token, (start, end) in zip(ids, offsets, strict=True):
        while remaining and remaining[-1][1] <= start:
            remaining.pop()
        is_in = bool(remaining) and end > remaining[-1][0] and end > start
        labels.append(token if is_in else IGNORED)
    return Example(ids, labels)
