"""Locations are assigned without code of the objects; no name hides code."""

from __future__ import annotations

import pytest

from eventloop.object_state.attributes import (
    attribute_location,
    class_attribute_location,
    is_attribute,
)


class Counting:
    """Refuses ordinary assignment, and counts in a property."""

    __slots__ = ("__dict__", "slot")
    shared = [1]

    @property
    def asked(self):
        raise AssertionError("a property ran")

    def __setattr__(self, name, value):
        raise AssertionError("__setattr__ ran")

    def count(self):
        pass


@pytest.mark.parametrize("name", ["asked", "count", "__class__", "not a name"])
def test_a_name_that_would_hide_code_is_no_attribute(name):
    """It may come from a file."""
    assert not is_attribute(Counting(), name)


@pytest.mark.parametrize("name", ["late", "shared", "slot"])
def test_a_name_that_hides_no_code_is_an_attribute(name):
    """A value of the class is hidden as `self.shared = ...` would hide it."""
    assert is_attribute(Counting(), name)


@pytest.mark.parametrize("name", ["late", "slot"])
def test_an_attribute_is_assigned_and_deleted_without_code_of_its_class(name):
    """`__setattr__` may refuse, or count."""
    whole = Counting()
    location = attribute_location(whole, name, "root")

    location.assign(3)
    value = getattr(whole, name)
    location.delete()

    assert (location.path, value, hasattr(whole, name)) == (f"root.{name}", 3, False)


class Registering(type):
    """A metaclass that refuses assignment."""

    def __setattr__(cls, name, value):
        raise AssertionError("__setattr__ of the metaclass ran")


class Registered(metaclass=Registering):
    pass


def test_an_attribute_of_a_class_is_assigned_without_code_of_its_metaclass():
    """As `type` itself would."""
    location = class_attribute_location(Registered, "count", "root")

    location.assign(3)

    assert Registered.count == 3
