"""Folders of save_pretrained from eventloop's checkpoints, written in the background, also to a store."""

from eventloop_hf_checkpoints.folders import Pretrained, write_folder
from eventloop_hf_checkpoints.plugin import HfCheckpoints

__all__ = ["HfCheckpoints", "Pretrained", "write_folder"]
