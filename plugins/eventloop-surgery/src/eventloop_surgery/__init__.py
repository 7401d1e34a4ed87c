"""Model surgery: replaces layers of a model, however deeply they are nested."""

from eventloop_surgery.replacing import Factory, Surgery, replace_modules, with_class

__all__ = ["Factory", "Surgery", "replace_modules", "with_class"]
