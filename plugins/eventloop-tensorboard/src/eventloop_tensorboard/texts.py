"""Texts and tables in TensorBoard's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

MOST_CHARS = (
    10_000  # per cell: the latest events are part of checkpoints, and the page shows all of a text
)
MOST_ROWS = 100


def summary_of(name: str, text: str | Mapping[str, Sequence[Any]]) -> Summary:
    """Returns a text, or a table with its columns' names as the first row.

    TensorBoard renders each cell as Markdown; indented text is shown unchanged.
    """
    if isinstance(text, str):
        cells = [text]
        shape = [1]
    else:
        rows = list(zip(*(column[:MOST_ROWS] for column in text.values()), strict=True))
        cells = [*text, *(cell for row in rows for cell in row)]
        shape = [len(rows) + 1, len(text)]
        num_left_out = max(map(len, text.values()), default=0) - len(rows)
        if num_left_out:
            cells += [f"... {num_left_out:,} more rows", *[""] * (len(text) - 1)]
            shape[0] += 1
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=map(_indented, cells),
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    # Named as by torch's SummaryWriter.add_text: a number may have the same name.
    tag = name.encode("utf-8", "replace").decode() + "/text_summary"
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _indented(cell: str | float | None) -> bytes:
    text = "" if cell is None else str(cell)
    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS]}... ({len(text) - MOST_CHARS:,} more characters)"
    return "".join(f"    {line}" for line in text.splitlines(keepends=True)).encode(
        "utf-8", "replace"
    )
