"""Learning from preferences, for the task `dpo`: rows, losses, and the plugin that computes them."""
