"""From package to plan: one file for each step of a plugin's life."""
