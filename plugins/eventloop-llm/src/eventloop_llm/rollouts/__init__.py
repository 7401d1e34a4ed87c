"""Completions that a model draws, and learning from their rewards, for the plugin `grpo`."""
