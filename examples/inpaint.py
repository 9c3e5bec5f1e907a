# SPDX-License-Identifier: Apache-2.0
"""Completing an image in colour most of whose values are missing, as in section 4 of the paper.

Every block of 8 x 8 pixels with its three colours, with all overlaps, is a task: a sparse mixture
of M elements of a dictionary, white functions of its 192 values. Each task lacks other values.
Elements and mixtures are learned from the few that are there.

    python examples/inpaint.py [FOLDER FOR THE PICTURE] [--image FILE] [--missing 0.8] [--seed 0]

Without ``--image`` it takes a part of a photograph that comes with scikit-learn. The last line of
the output is the peak signal-to-noise ratio of the result in dB.
"""

import argparse
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

from blocks import SIZE, blocks_of, elements_of, first_params, image_of, mosaic, psnr, read
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist

import numpyro_spikeslab as nss

VALUES = np.arange(3.0 * SIZE**2)  # of a block; the order does not matter to white functions
NUM_ELEMENTS = 100
NUM_STEPS = 45


class Inpainted(NamedTuple):
    """
    - **image** - the observed pixels, and the posterior mean of the others.
    - **sd** - the posterior standard deviation in a block, on average over blocks.
    - **elements** - of the dictionary, in the order of their use, shape (M, 8, 8, 3).
    - **sizes** - number of elements that each block uses.
    """

    image: np.ndarray
    sd: np.ndarray
    elements: np.ndarray
    sizes: np.ndarray


def photograph() -> np.ndarray:
    """A part of a photograph in colour, 0 to 255."""
    return load_sample_image("flower.jpg")[75:203, 170:298].astype(float)


def fit(guide: nss.PairedGuide, Y: jnp.ndarray, seed: int) -> dict[str, Any]:
    """The parameters of the guide; all else that a fit keeps in memory is left behind here."""
    svi = nss.CAVI(guide.model, guide, plain=True)
    key, start = random.split(random.key(seed))
    start = first_params(start, Y, NUM_ELEMENTS)
    with warnings.catch_warnings():
        # images are the same long before the bound stands still
        warnings.filterwarnings("ignore", "CAVI.run: the bound still moves")
        return svi.run(key, NUM_STEPS, VALUES, Y, init_params=start, progress_bar=False).params


def inpaint(image: np.ndarray, seed: int = 0) -> Inpainted:
    """Learn the dictionary and complete the image.

    :param image: shape (rows, columns, 3), NaN where a value is missing.
    """
    Y = jnp.asarray(blocks_of(image.astype(np.float32)))
    model = nss.models.mtmkl(
        ["white"] * NUM_ELEMENTS,
        shared_noise=True,
        priors=dict.fromkeys(("noise", "slab_scale"), dist.HalfNormal(100.0)),
    )
    guide = nss.PairedGuide(model)
    params = fit(guide, Y, seed)
    mean, variance = map(np.asarray, guide.predict(params, VALUES, Y))
    precision = 1 / variance.mean(axis=0)
    found = image_of(mean, precision, image.shape)
    sd = image_of(np.sqrt(variance), precision, image.shape)
    used = np.asarray(params["W_auto_probs"] > 0.5)
    elements = elements_of(params)[np.argsort(-used.sum(axis=0))]
    return Inpainted(
        np.where(np.isnan(image), found, image),
        np.where(np.isnan(image), sd, 0),
        np.moveaxis(elements.reshape(-1, 3, SIZE, SIZE), 1, -1),
        used.sum(axis=1),
    )


def without(truth: np.ndarray, missing: float, seed: int = 0) -> np.ndarray:
    """The image with a share of the colours of its pixels replaced by NaN."""
    rng = np.random.default_rng(seed)
    return np.where(rng.uniform(size=truth.shape) < missing, np.nan, truth)


def plot(truth: np.ndarray, observed: np.ndarray, found: Inpainted) -> plt.Figure:
    """The images, and the elements that are used most."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
    images = {
        "original": truth,
        f"{np.isnan(observed).mean():.0%} missing": np.nan_to_num(observed),
        f"completed, {psnr(found.image, truth):.2f} dB": found.image,
    }
    for ax, (title, image) in zip(axes, images.items(), strict=False):
        ax.imshow(np.clip(image, 0, 255) / 255)
        ax.set_title(title)
    axes[3].imshow(0.5 + 0.5 * mosaic(found.elements, across=10))
    axes[3].set_title("dictionary, most used first")
    for ax in axes:
        ax.set_axis_off()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--missing", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.missing < 1:
        parser.error(f"--missing must lie between 0 and 1, got {options.missing}")
    try:
        truth = photograph() if options.image is None else read(options.image)
    except OSError as error:
        parser.error(f"--image: {error}")
    if truth.ndim != 3:
        parser.error("--image must be in colour")
    observed = without(truth, options.missing, options.seed)
    rows, columns = (n - SIZE + 1 for n in truth.shape[:2])
    print(f"{rows * columns} blocks, {np.isnan(observed).mean():.1%} of their values are missing")
    begin = time.perf_counter()
    result = inpaint(observed, options.seed)
    print(f"{time.perf_counter() - begin:.1f} s")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        plot(truth, observed, result).savefig(options.folder / "inpaint.png", dpi=120)
    print(f"PSNR {psnr(result.image, truth):.2f}")


if __name__ == "__main__":
    main()
