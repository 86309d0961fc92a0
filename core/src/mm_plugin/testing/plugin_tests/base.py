"""What all shared test classes build on: parameters that a plugin's subclass states as class attributes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest


class PluginTests:
    """Base of the shared test classes. A plugin subclasses them in its tests, under names that begin with `Test`.

    The plugin's conftest.py provides the fixtures that a class asks for, among them as a rule `registry`, `checkpoint` (a
    folder), `processor` and `encoder` (opened from it without options).

    Attributes:
        PARAMETERS: by name of a test's parameter, the class attribute that holds its values: a mapping from ids to values, or a
            sequence of values.

    >>> class Shared(PluginTests):
    ...     PARAMETERS = {"size": "SIZES"}
    ...     SIZES = (1, 2)
    ...
    ...     def test_a_size_is_positive(self, size: int) -> None:
    ...         assert size > 0
    >>> class TestMine(Shared):
    ...     SIZES = (7,)
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test by the class attributes that `PARAMETERS` names; called by pytest."""
        for name, attribute in self.PARAMETERS.items():
            if name in metafunc.fixturenames:
                values = getattr(self, attribute)
                ids = list(values) if isinstance(values, Mapping) else _named
                metafunc.parametrize(name, list(values.values() if isinstance(values, Mapping) else values), ids=ids)


def _named(value: Any) -> str | None:
    """An enum's member by its name; anything else as pytest names it."""
    return value.name if isinstance(value, enum.Enum) else None
