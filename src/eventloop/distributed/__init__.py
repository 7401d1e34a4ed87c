"""Training with several processes: communication, and handling of failures."""
