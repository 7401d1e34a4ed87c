"""The command `eventloop plugins`: a module each of its subcommands."""
