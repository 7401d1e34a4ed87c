"""Files: safe access to a run's files, and checks whether other files can be written."""
