"""eventloop: a PyTorch training loop made of hooks; install a plugin and it takes part."""

import lazy_loader

__version__ = "0.1.0"
# What needs torch is imported when it is first asked for, so that `import eventloop` stays fast:
# `__init__.pyi` lists the names.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
