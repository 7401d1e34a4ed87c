"""A run: built from task, plugins and settings, started fresh or from a checkpoint, described."""
