"""The error of values that a checkpoint can't have."""


class NotSavableError(ValueError):
    """A value can't be saved, or no value has this nest; the message is the reason."""
