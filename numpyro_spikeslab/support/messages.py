# SPDX-License-Identifier: Apache-2.0
"""The form of error messages: the wrong value, the expected one, and the remedy."""

from typing import Any


def bad(name: str, got: Any, expected: str, remedy: str = "") -> ValueError:
    """Make the error for an argument or a site, to be raised by the caller.

    :param name: the caller and the argument, such as ``"CAVI: num_restarts"``.
    :param got: the value, or a phrase about it.
    :param expected: a phrase about correct values.
    :param remedy: a sentence with the remedy.
    """
    return ValueError(f"{name}: got {got}, expected {expected}.{remedy and ' ' + remedy}")


def some(values: list[Any]) -> str:
    """Return the first values of a list, and how many there are if they are more."""
    return f"{values[:5]}" if len(values) < 6 else f"{values[:5]}, the first of {len(values)}"
