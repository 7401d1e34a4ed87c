"""The command `eventloop plugins`: one module per subcommand."""
