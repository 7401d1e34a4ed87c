"""Files: those of a run go through one door, which follows no link; whether others can be written."""
