"""`eventloop export CHECKPOINT FILE.safetensors`; `checkpoint/checkpoint_export.py` writes the file."""

from __future__ import annotations

from pathlib import Path

from eventloop.checkpoint.checkpoint_export import export_weights
from eventloop.cli.arguments import Arguments, Command
from eventloop.cli.named_checkpoints import BEST_OPTION, one_checkpoint, size_text, words
from eventloop.cli.output_files import require_writable
from eventloop.cli.printing import write_text
from eventloop.errors import counted
from eventloop.safe_text import one_line

COMMAND = Command(
    "export",
    "Writes only the weights of a checkpoint to a safetensors file; needs no task. CHECKPOINT is the "
    "folder or URL of a checkpoint, or of a run, which means its newest that verifies. These are the "
    "weights that training resumes from; `eventloop fit --export` writes the weights that evaluation "
    "uses, such as an average.",
    (BEST_OPTION,),
    argument="CHECKPOINT FILE.safetensors",
    takes_plugins=False,
)


def run(arguments: Arguments) -> int:
    """Runs the command."""
    source, target = words(arguments, COMMAND)
    path = Path(target)
    require_writable(path)
    with one_checkpoint(source, best=BEST_OPTION.name in arguments.given) as (checkpoint, place):
        names, left_out_paths = export_weights(checkpoint, path)
    size = size_text(path.stat().st_size)
    line = f"{path}: {counted(len(names), 'tensor')}, {size}, of {place}"
    write_text(one_line(line))
    for name in left_out_paths:
        write_text(one_line(f"left out, because it is not a tensor: {name}"))
    return 0
