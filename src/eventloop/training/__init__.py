"""Training: the default answer to each hook of the loop, and what those answers are made of."""
