"""Checkpoints: what a run saves, in which format, and where.

`encoding` turns values into tensors and JSON; `tensors` reads and writes the files of tensors;
`manifest` lists a folder's files with their digests; `verifying` checks them, without torch;
`format` writes and reads one folder; `store` manages the checkpoints of a run.
"""
