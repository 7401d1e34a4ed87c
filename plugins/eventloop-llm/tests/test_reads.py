"""What the script says of reads from the device, which the table of the documents has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from-hugging-face.md"
if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL isn't installed", allow_module_level=True)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "reward"])
def test_a_step_reads_as_often_as_the_table_says(kind):
    """TRL's in each microbatch, here never."""
    import reads_of_a_step as reads

    found = [reads.counted(how, kind, num) for how in (reads.ours, reads.theirs) for num in (1, 3)]

    (row,) = re.findall(
        rf"^\| {kind}(?: model)? \|(( \d+ \|){{4}})$", TABLE.read_text("utf-8"), re.M
    )
    assert found == re.findall(r"\d+", row[0])
