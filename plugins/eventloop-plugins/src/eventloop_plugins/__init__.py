"""The subcommands of `eventloop plugins` that show, check and start plugins: a module each."""
