"""TRL's trainers go on after a kill, with what they collect between logs and with models beside the trained one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hf_cases import differing
from test_hf_resumed import Killed, dying
from trl_cases import TRAINERS, trl_trained

from eventloop_transformers import on_eventloop

MORE: dict[str, dict[str, Any]] = {
    "DPO": {"sync_ref_model": True, "ref_model_sync_steps": 3},
    "GRPO": {"gradient_accumulation_steps": 2},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", TRAINERS)
def test_it_goes_on_to_the_bits_of_one_go(tmp_path, monkeypatch, name):
    """Metrics that wait for the next log, completions that wait for the next step, a reference model."""
    more = {"logging_steps": 4, **MORE.get(name, {})}
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    whole = trl_trained(name, lambda kind: kind, "out", **more)
    monkeypatch.chdir(tmp_path / "ours")

    def on(kind: type) -> type:
        loop = on_eventloop(kind, run_dir=tmp_path / "run", checkpoint_interval="1ba")
        return dying(loop, at)

    for at in (5, 4, 0):
        with suppress(Killed):
            found = trl_trained(name, on, "out", **more)

    assert differing({**whole, "calls": 0}, {**found, "calls": 0}) == []
