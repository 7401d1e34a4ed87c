"""What commands of packages are made of: a command line, a job, and output; `commands.pyi` has the types."""

import lazy_loader

# Imported when it is first asked for: not every command needs torch.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    "eventloop",
    submod_attrs={
        module: names.split()
        for module, names in {
            "checkpoint.checkpoint_folder": "Checkpoint read_checkpoint verify_part",
            "checkpoint.temporary_folders": "is_replaced",
            "checkpoint.run_lock": "RunLock",
            "checkpoint.saved_tensors": "SavedTensor",
            "checkpoint.locations": "best_among checkpoints_at require_checkpoints why_none",
            "checkpoint.store": "FoundCheckpoint look_at",
            "checkpoint.verifying": "damages",
            "cli.arguments": "Arguments Command CommandOption command_help read_arguments refuse_flags",
            "cli.job": "Job job_help output_path prepare",
            "cli.fit_options": "FIT_OPTIONS",
            "cli.named_checkpoints": "one_checkpoint size_text uploaded_at words",
            "cli.output": "stdout_to_stderr write_json write_lines write_table write_text",
            "cli.task_file": "load_task_file",
            "config.option_types": "flag",
            "distributed.exit": "FAILURE NO_CHECKPOINT ending_with_parent",
            "errors": "UsageError a closest counted",
            "files.run_folder": "read_json",
            "naming": "fold json_value",
            "plugin.candidates": "Candidates",
            "plugin.lock_digests": "file_digests",
            "plugin.records": "Candidate",
            "run.differences": "config_differences plugin_differences task_differences",
            "signals": "Interrupted Terminated",
            "safe_text": "one_line",
            "urls": "Place place_of",
        }.items()
    },
)
