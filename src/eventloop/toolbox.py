"""Building blocks for plugins that no hook provides.

`toolbox.pyi` lists the names by subject.

Attributes:
    FIELDS: The field of the clock that counts each unit: `{"ba": "batch", ...}`.
    Results: The numbers of each eval set, by the set's name and theirs.
    UNITS: Every unit that a `Time` can have.
"""

import lazy_loader

# Imported when it is first asked for: messages and files of runs don't need torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub("eventloop", __file__)
