"""Options that several tasks have: each task lists them, and they mean the same in all of them."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import eventloop_llm.dpo
import eventloop_llm.grpo
import eventloop_llm.reward
import eventloop_llm.sft
from eventloop.config.option_types import parameter_docs

TASKS = {
    "sft": eventloop_llm.sft.task,
    "dpo": eventloop_llm.dpo.task,
    "reward": eventloop_llm.reward.task,
    "grpo": eventloop_llm.grpo.task,
}
# Their descriptions name the rows of the method.
OF_A_METHOD = {"model", "data", "max_length", "loss"}


def test_an_option_of_several_tasks_is_described_alike_in_all():
    """A user who knows `--task.warmup` of a task knows it in the others."""
    descriptions = defaultdict(set)
    for task in TASKS.values():
        for name, text in parameter_docs(task).items():
            descriptions[name].add(re.sub("pairs|prompts", "rows", text))

    different = {name for name, texts in descriptions.items() if len(texts) > 1}

    assert different <= OF_A_METHOD
    assert {"tokenizer", "batch_size", "lr", "schedule", "warmup"} <= descriptions.keys()


def test_an_option_of_several_tasks_has_the_same_type_in_all():
    """A configuration file of a task can be taken over for another."""
    annotations = defaultdict(set)
    for task in TASKS.values():
        for name, parameter in inspect.signature(task).parameters.items():
            annotations[name].add(parameter.annotation)

    assert {name for name, types in annotations.items() if len(types) > 1} == set()


def test_every_option_of_a_task_is_described():
    """`--help` shows a sentence for each option."""
    for task in TASKS.values():
        documented = parameter_docs(task)

        assert documented.keys() == inspect.signature(task).parameters.keys()
