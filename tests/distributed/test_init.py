"""A block that one rank runs before the others."""

from __future__ import annotations

import os

import torch

from eventloop import rank_zero_first
from eventloop_testing import run_ranks


def test_the_first_rank_prepares_what_all_read(tmp_path):
    """The others find it there."""

    def prepare():
        file, rank = tmp_path / "cache", os.environ["RANK"]
        for _ in range(20):
            with rank_zero_first():
                found = file.exists()
                assert found == (rank != "0")
                if rank == "0":
                    file.touch()
            run_together()
            if rank == "0":
                file.unlink()
            run_together()
        return True

    def run_together():
        torch.distributed.barrier()

    assert run_ranks(prepare, world_size=3) == [True] * 3
