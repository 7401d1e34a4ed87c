"""Ranges of versions, as pip writes them: ">=0.2,<1"; packaging is imported when one is read."""

from __future__ import annotations

import re

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9_-]*)\s*(.*?)\s*")


def is_in_range(version: str, specifier: str) -> bool:
    """Returns whether a version will do; pre-releases will, where they are in range.

    Args:
        version: what there is; one that isn't a version is in no range.
        specifier: as pip writes it, ">=0.2,<1"; "" for any.
    """
    if not specifier:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return False


def admits_older(specifier: str, version: str) -> bool:
    """Returns whether a range has versions that came before one."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    lowest = [
        Version(one.version.removesuffix(".*"))
        for one in SpecifierSet(specifier)
        if one.operator in (">=", ">", "==", "~=")
    ]
    return not lowest or max(lowest) < Version(version)


def split_requirement(text: str) -> tuple[str, str] | None:
    """Returns a plugin's name and the versions that are asked for, "" for any; None for neither."""
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        return None
    name, specifier = match.groups()
    if specifier:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            SpecifierSet(specifier)
        except InvalidSpecifier:
            return None
    return name, specifier
