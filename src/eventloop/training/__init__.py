"""Training: the default implementation of each hook of the loop, and its building blocks."""
