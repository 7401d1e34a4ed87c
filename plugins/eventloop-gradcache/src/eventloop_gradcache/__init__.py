"""GradCache for eventloop: losses over pairs of a large batch, in microbatches."""

from eventloop_gradcache.gather import all_gather
from eventloop_gradcache.plugin import GradCache

__all__ = ["GradCache", "all_gather"]
