"""The command `eventloop checkpoints`: a module each of its subcommands."""
