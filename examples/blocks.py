# SPDX-License-Identifier: Apache-2.0
"""Images as overlapping blocks of pixels, a column each, and back; where their fits start."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from jax import random
import jax.numpy as jnp

SIZE = 8  # pixels along a block


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB."""
    return 10 * np.log10(255**2 / np.mean((np.clip(image, 0, 255) - truth) ** 2))


def blocks_of(image: np.ndarray) -> np.ndarray:
    """All blocks of an image in grey, or in colour, shape (rows, columns, 3), a column each."""
    windows = np.lib.stride_tricks.sliding_window_view(image, (SIZE, SIZE), axis=(0, 1))
    return windows.reshape(windows.shape[0] * windows.shape[1], -1).T


def image_of(blocks: np.ndarray, precision: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Means over all blocks that have a pixel, weighted by the precisions of the blocks."""
    rows, columns = (n - SIZE + 1 for n in shape[:2])
    values = np.moveaxis(blocks.reshape(-1, SIZE, SIZE, rows, columns), 0, -1)
    precision = precision.reshape(rows, columns, 1)
    total, weight = np.zeros((*shape[:2], values.shape[-1])), np.zeros((*shape[:2], 1))
    for i in range(SIZE):
        for j in range(SIZE):
            total[i : i + rows, j : j + columns] += precision * values[i, j]
            weight[i : i + rows, j : j + columns] += precision
    return (total / weight).reshape(shape)


def read(file: Path) -> np.ndarray:
    """An image in grey or colour, 0 to 255, without transparency."""
    image = np.asarray(plt.imread(file), float)
    image = image[..., :3] if image.ndim == 3 else image
    return image * 255 if image.max() <= 1 else image


def mosaic(elements: np.ndarray, across: int) -> np.ndarray:
    """Elements of a dictionary as one picture, each at its own size, -1 to 1, with white between.

    :param elements: shape (M, SIZE, SIZE), or (M, SIZE, SIZE, 3) in colour.
    :param across: how many in a row.
    """
    colours = elements.shape[3:]
    largest = abs(elements).max(axis=tuple(range(1, elements.ndim)), keepdims=True)
    scaled = elements / np.where(largest > 0, largest, 1)
    widths = [(0, 0), (0, 1), (0, 1), *[(0, 0) for _ in colours]]
    framed = np.pad(scaled, widths, constant_values=1.0)
    tiles = framed.reshape(-1, across, SIZE + 1, SIZE + 1, *colours).swapaxes(1, 2)
    return tiles.reshape(-1, across * (SIZE + 1), *colours)[:-1, :-1]


def elements_of(params: dict[str, Any]) -> np.ndarray:
    """Posterior means of the elements of the dictionary, shape (M, N), of white functions."""
    return np.asarray(params["phi_auto_linear"] / (1 + params["phi_auto_precision"]))


def first_params(
    key: Any, Y: Any, num_elements: int, noise: float = 0.0, shape: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Where a fit starts: at mixtures of random elements, few of which are used, and much noise.

    A small noise or many elements in use would end in a dictionary that copies what is seen.

    :param Y: blocks, NaN where a value is missing.
    :param noise: its standard deviation, roughly.
    :param shape: of the inclusion probabilities.
    """
    (N, Q), M = Y.shape, num_elements
    count = jnp.maximum(jnp.sum(~jnp.isnan(Y), axis=0), 1)
    return {
        "W_auto_loc": (jnp.nan_to_num(Y) / count).T @ random.normal(key, (N, M)),
        "W_auto_probs": jnp.full((Q, M), 0.05, Y.dtype),
        "W_auto_scale": jnp.ones((Q, M)),
        "phi_auto_precision": jnp.ones((M, N)),
        "phi_auto_linear": jnp.zeros((M, N)),
        "inclusion_auto_loc": jnp.full(shape, 0.05),
        "slab_scale_auto_loc": jnp.nanstd(Y) / (0.05 * M) ** 0.5,
        "noise_auto_loc": jnp.asarray(max(70.0, 2.5 * noise)),
    }
