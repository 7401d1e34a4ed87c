"""Checkpoints: what a run saves, in which format, and where.

`encoding` turns values into tensors and JSON; `safetensors_files` reads and writes
those; `manifest` lists a folder's files with their digests; `verifying` checks them, without torch;
`checkpoint_files` writes and reads one folder; `store` manages the checkpoints of a run.
"""
