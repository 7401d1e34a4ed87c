# ruff: noqa: I001  names of one subject stay together
"""The names of `toolbox.py`, as type checkers and editors read them; the subjects are headings of the reference."""

# Messages: the closest of several names, and the fix as the caller would write it (join it with `+`).
from .errors import closest as closest, counted as counted, first_of as first_of
from .fixes import as_option as as_option, as_set as as_set, switch_off as switch_off
from .run.run_manifest import announce_off as announce_off
from .safe_text import one_line as one_line
from .signals import status_of as status_of

# Files that a plugin writes, and Python files that it imports.
from .files.disk import replace_file as replace_file
from .files.file_modes import apply_umask as apply_umask
from .files.run_folder import (
    RunFolder as RunFolder,
    append_whole as append_whole,
    why_no_file as why_no_file,
)
from .plugin.load import module_of_file as module_of_file, spec_of_file as spec_of_file

# Time: units, as the clock counts them, and a ramp over a part of the run.
from .clock import FIELDS as FIELDS, UNITS as UNITS
from .task.schedule_curves import Ramp as Ramp

# Samples, inputs and targets of batches of any structure.
from .data.batches import (
    describe as describe,
    describe_pair as describe_pair,
    inputs_of as inputs_of,
    is_pair as is_pair,
    map_tensors as map_tensors,
    num_samples as num_samples,
    targets_of as targets_of,
    with_inputs as with_inputs,
    with_targets as with_targets,
)
from .data.loaders import known_length as known_length
from .data.microbatch_splitting import split as split
from .data.microbatches import Microbatches as Microbatches
from .data.sample_seeds import reads_batches as reads_batches

# Forward passes outside of the loop.
from .rng import kept_generators as kept_generators
from .training.evaluation import (
    evaluation_mode as evaluation_mode,
    evaluation_mode_note as evaluation_mode_note,
    in_eval_mode as in_eval_mode,
)
from .training.metrics import predictions as predictions
from .training.optimizers import (
    untrained_note as untrained_note,
    wants_closure as wants_closure,
)
from .training.failed_inputs import refusal as refusal

# The random generators of Python, NumPy and torch: found, seeded, and watched for use.
from .rng import host_generators as host_generators, is_generator as is_generator, reseed as reseed

# Model surgery: other layers, wherever they are in a model.
from .training.surgery import (
    Surgery as Surgery,
    replace_modules as replace_modules,
    with_class as with_class,
)

# Samples with second targets, and plugins that share the batches.
from .training.blending import (
    SecondTargets as SecondTargets,
    SharesBatches as SharesBatches,
    blended as blended,
    owns_batch as owns_batch,
)

# Metrics of eval sets by name, for options such as `test/accuracy`.
from .training.metrics import (
    NamedMetric as NamedMetric,
    find_metric as find_metric,
    metric_name as metric_name,
    named_metrics as named_metrics,
)

# State dicts: weights from files and checkpoints, slices, nested states, whole checkpoints.
from .checkpoint.checkpoint_files import (
    Checkpoint as Checkpoint,
    read_checkpoint as read_checkpoint,
    write_checkpoint as write_checkpoint,
)
from .checkpoint.encoding import flatten as flatten
from .checkpoint.saved_tensors import SavedTensor as SavedTensor
from .checkpoint.checkpoint_export import (
    FoundWeights as FoundWeights,
    saved_weights_at as saved_weights_at,
    weights_at as weights_at,
    with_tied as with_tied,
)
from .distributed.collectives import take_from_first as take_from_first
from .training.sharded_tensors import gathered as gathered
from .training.tensor_slices import TensorSlice as TensorSlice

# Sharded tensors: to the slices in a checkpoint and back, norms; layers that repeat; layouts of ranks.
from .checkpoint.states import shard_of as shard_of, shards_like as shards_like
from .mesh import Layout as Layout
from .training.compiling import repeated_layers as repeated_layers
from .training.sharded_tensors import (
    groups_of as groups_of,
    local as local,
    sharded as sharded,
    slice_of as slice_of,
    sum_over_ as sum_over_,
    total_norm as total_norm,
)

# Progress as lines of text: for progress plugins, and for runs without one.
from .training.progress_lines import (
    EpochLine as EpochLine,
    ProgressLines as ProgressLines,
    Results as Results,
    clock_time as clock_time,
    duration as duration,
    mean_loss as mean_loss,
    per_second as per_second,
    scalars as scalars,
    short as short,
    shortened as shortened,
)

# Observers: what wraps implementations of hooks, to watch a run.
from .plugin.calling import caller as caller
from .plugin.hook_errors import moment_in as moment_in
from .plugin.observe import (
    Observer as Observer,
    instead as instead,
    with_context as with_context,
)
from .plugin.order import Implementation as Implementation
