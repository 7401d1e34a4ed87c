"""The state of arbitrary objects: finds their attributes, detects changes, and saves and restores them.

`walk` finds locations: `entering` decides which objects are entered, `parts` and `attributes` list the
locations in them. `values` encodes and `decoding` restores values, with `tensor_memory`, `generators` and
`iterators`. `fingerprints` detects changes, and `tracked` saves and restores them. Nothing here runs a
property or a method of the objects.
"""
