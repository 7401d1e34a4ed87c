"""Failing: what happens when a process is stopped, hangs or raises, and what is said of it."""
