"""Checkpoints: the state that a run saves, its format, and its location.

`encoding` turns values into tensors and JSON; `safetensors_files` reads and writes the tensors;
`manifest` lists a folder's files with their digests; `verifying` checks them, without torch;
`checkpoint_files` writes and reads a folder; `store` manages the checkpoints of a run.
"""
