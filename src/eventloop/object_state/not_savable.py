"""The error for values that can't be saved in a checkpoint."""


class NotSavableError(ValueError):
    """A value can't be saved, or a nest is invalid; the message is the reason."""
