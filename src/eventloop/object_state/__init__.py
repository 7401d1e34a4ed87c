"""The state of any object: a walk over attributes, what has changed in them, and how it is put back.

`walk` finds the places of an object graph, `values` encodes what is in a place, and `tracked`
compares, saves and restores. Nothing here runs a property or a method of the objects.
"""
