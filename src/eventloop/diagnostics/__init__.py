"""Diagnostics: what a run is looked at with; there only when asked for."""
