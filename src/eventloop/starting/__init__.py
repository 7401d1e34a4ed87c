"""Starting: a run is built, anew or from a checkpoint."""
