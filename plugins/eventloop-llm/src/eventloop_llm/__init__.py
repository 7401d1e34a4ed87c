"""Language models after their pre-training.

Tasks, for `eventloop fit eventloop_llm.sft` and so on: `sft`, `dpo`, `reward`, `grpo`.
Plugins, off until they are named: `grpo`, `lora`, `hf_checkpoints`.
Their parts: `chats` makes tokens of rows, `packing` packs them, `models` loads and runs models, `preferences`
and `rollouts` have the losses.

Importing this package imports none of them.
"""
