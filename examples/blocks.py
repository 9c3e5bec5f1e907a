# SPDX-License-Identifier: Apache-2.0
"""Images as overlapping blocks of pixels, a column each, and back."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

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
