# SPDX-License-Identifier: Apache-2.0
"""The test of tables of what is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refusals(
    table: dict[str, tuple] | list[tuple], act: Callable = lambda call: call(), *fixtures: str
) -> Callable:
    """Make a test of a table, in which each row ends with the message of an error.

    :param act: does what is refused, from the rest of a row and the values of these fixtures.
    """
    rows = table if isinstance(table, dict) else {str(i): row for i, row in enumerate(table)}

    @pytest.mark.usefixtures("unchecked_types")
    @pytest.mark.parametrize("case", rows)
    def test(case: str, request: pytest.FixtureRequest) -> None:
        values: list[Any] = [request.getfixturevalue(name) for name in fixtures]
        *row, message = rows[case]
        with pytest.raises((TypeError, ValueError), match=message):
            act(*row, *values)

    return test
