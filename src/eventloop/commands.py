"""What commands of packages are made of: a command line, a job, and output; `commands.pyi` lists the names."""

import lazy_loader

# Imported when it is first asked for: not every command needs torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub("eventloop", __file__)
