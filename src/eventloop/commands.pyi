# ruff: noqa: I001  names of one module stay together
"""The names of `commands.py`, as type checkers and editors read them."""

from .checkpoint.run_lock import (
    RunLock as RunLock,
)
from .cli.arguments import (
    Arguments as Arguments,
    Command as Command,
    CommandOption as CommandOption,
    command_help as command_help,
    read_arguments as read_arguments,
    refuse_flags as refuse_flags,
)
from .cli.job import (
    Job as Job,
    job_help as job_help,
    prepare as prepare,
)
from .cli.fit_options import (
    FIT_OPTIONS as FIT_OPTIONS,
)
from .cli.named_checkpoints import (
    words as words,
)
from .cli.output_files import output_path as output_path
from .cli.printing import (
    stdout_to_stderr as stdout_to_stderr,
    write_json as write_json,
    write_lines as write_lines,
    write_table as write_table,
    write_text as write_text,
)
from .cli.command_registry import run_command as run_command
from .cli.task_file import (
    load_task_file as load_task_file,
)
from .config.option_types import (
    flag as flag,
)
from .distributed.process_ends import (
    FAILURE as FAILURE,
    ending_with_parent as ending_with_parent,
)
from .errors import (
    UsageError as UsageError,
    a as a,
    closest as closest,
    counted as counted,
)
from .naming import (
    fold as fold,
    json_value as json_value,
)
from .plugin.assemble import (
    Discovery as Discovery,
)
from .plugin.lock_digests import (
    file_digests as file_digests,
)
from .plugin.records import (
    Plugin as Plugin,
)
from .run.differences import (
    config_differences as config_differences,
    plugin_differences as plugin_differences,
    task_differences as task_differences,
)
from .secret_values import (
    shown_options as shown_options,
)
from .signals import (
    Terminated as Terminated,
    interrupted as interrupted,
)
from .safe_text import (
    one_line as one_line,
)
from .urls import (
    place_of as place_of,
)
