"""The example of the package shows what its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hf_cases import process_environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "killed.py"


@pytest.mark.nightly
def test_the_example_is_killed_twice_and_ends_with_the_same_bits(tmp_path):
    """On a CPU, within a minute."""
    environment = process_environment(tmp_path)

    ended = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, env=environment
    )

    assert "killed after 25 steps\nkilled after 40 steps\ndone after all steps" in "\n".join(
        one for one in ended.stdout.splitlines() if one.startswith(("killed", "done"))
    )
    assert "the same: True" in ended.stdout
    assert "the same bits: True" in ended.stdout
