"""Model surgery: layers of a model are replaced by others, wherever they stand in it."""

from eventloop_surgery.replacing import Factory, Surgery, replace_modules, with_class

__all__ = ["Factory", "Surgery", "replace_modules", "with_class"]
