"""In one process the plugin takes no part, and its package doesn't import FSDP2."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys

import pytest
from eventloop_fsdp import Fsdp
print(Fsdp().layers, [one for one in ("torch.distributed.fsdp", "eventloop_fsdp.sharding") if one in sys.modules])
from eventloop_fsdp import parts_of, shard
print(parts_of.__module__, shard.__module__)
"""


@pytest.mark.nightly
def test_what_needs_fsdp2_is_imported_when_it_is_asked_for():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)

    assert ran.stdout.splitlines() == ["None []", "eventloop_fsdp.sharding eventloop_fsdp.sharding"]
