"""The state of any object: a walk over attributes, what has changed in them, and how it is put back.

`walk` finds locations: `entering` decides which objects are entered, `parts` and `attributes` list what is
in them. `values` encodes and `decoding` restores values, with `tensor_memory`, `generators` and `iterators`.
`fingerprints` tell what has changed, and `tracked` saves and restores it. Nothing here runs a property or
a method of the objects.
"""
