"""Checkpoints: what is saved of a run, in which bytes, and where.

`nest` turns values into tensors and JSON; `tensor_file` and `bounded_json` are the two kinds of
file; `manifest` vouches for the files of a folder; `verifying` looks whether it does so rightly, and
needs no torch; `format` writes and reads one folder; `store` keeps those of a run. `disk` is the only
place that touches the file system.
"""
