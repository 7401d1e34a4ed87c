"""Pairs for the tests of packages that learn from preferences."""

from __future__ import annotations

from sft_cases import text, turn

NUM_ROWS = 12
# Texts, and chats: what TRL's older trainers take, and what the others do.
PAIRS = [
    {"prompt": text(seed) + " ", "chosen": text(seed + 50), "rejected": text(seed + 90)}
    for seed in range(NUM_ROWS)
]
CHATS = [
    {
        "prompt": [turn("user", text(seed))],
        "chosen": [turn("assistant", text(seed + 50))],
        "rejected": [turn("assistant", text(seed + 90))],
    }
    for seed in range(NUM_ROWS)
]
