"""TRL's trainers on eventloop's loop, not a line of them changed."""

from __future__ import annotations

import pytest
from hf_cases import differing
from trl_cases import TRAINERS, trl_trained

from eventloop_transformers import on_eventloop

WITH_EVALUATION = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
}
ARGUMENTS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 4},
    "accumulation in bf16": {"gradient_accumulation_steps": 4, "bf16": True},
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_trl_trains_as_on_its_own_loop(tmp_path, monkeypatch, name, arguments):
    """Weights, optimizer, history, files, random numbers and callbacks."""
    more = ARGUMENTS[arguments] | (WITH_EVALUATION if name in ("SFT", "DPO") else {})
    results = []
    for folder, on in (("theirs", lambda kind: kind), ("ours", on_eventloop)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        results.append(trl_trained(name, on, "out", **more))

    assert differing(*results) == []
