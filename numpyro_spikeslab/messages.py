# SPDX-License-Identifier: Apache-2.0
"""The form of error messages: what was given, what was expected, and the remedy."""

from typing import Any


def bad(what: str, got: Any, expected: str, remedy: str = "") -> ValueError:
    """Make the error for an argument or a site, to be raised by the caller.

    :param what: who found it and what it is about, such as ``"CAVI: num_restarts"``.
    :param got: the value, or what is wrong with it.
    :param expected: what it should have been.
    :param remedy: what to do, a sentence.
    """
    return ValueError(f"{what}: got {got}, expected {expected}.{remedy and ' ' + remedy}")
