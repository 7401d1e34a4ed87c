"""A run: built from task, plugins and settings, started anew or from a checkpoint, described."""
