"""From package to plan: one module for each step of a plugin's life."""
