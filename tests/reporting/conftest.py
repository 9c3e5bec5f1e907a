# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the pictures."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """Draw off the screen, and close the figures of a test."""
    plt.switch_backend("Agg")
    yield
    plt.close("all")
