"""Two ranks under torchrun, over gloo, train and go on as under transformers' loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hf_cases import process_environment

SCRIPT = Path(__file__).with_name("hf_ranks.py")


@pytest.mark.nightly
def test_two_ranks_end_as_theirs(tmp_path):
    """Everything on each of them; gradients, losses and tokens of both go into the weights."""
    environment = process_environment(tmp_path / "site")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]

    ended = subprocess.run(
        [*launcher, SCRIPT, str(tmp_path)], capture_output=True, text=True, env=environment
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one for one in found if any(one.values())] == []
