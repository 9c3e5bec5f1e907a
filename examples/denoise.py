# SPDX-License-Identifier: Apache-2.0
"""Denoising an image by sparse factor analysis of its blocks, as in section 4 of the paper.

Every block of 8 x 8 pixels, with all its overlaps, is a task: a sparse mixture of M elements of a
dictionary, which are white functions of the pixels. Elements and mixtures are learned from the
noisy image alone. Four things make it better than the paper has it: each block's mean is left out
of the model, elements have inclusion probabilities of their own, then similar blocks share these,
and there the noise is known: learned noise would include the error of the fit.

    python examples/denoise.py [FOLDER FOR THE PICTURE] [--image FILE] [--noise 25] [--seed 0]
    python examples/denoise.py --paper {white,exponential} [--image ...]   without these, no picture

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
from sklearn.cluster import KMeans
from sklearn.datasets import load_sample_image
from tinygp.kernels import Exp
from tinygp.kernels.distance import L2Distance

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

PIXELS = np.indices((SIZE, SIZE)).reshape(2, -1).T.astype(float)  # their positions
NUM_ELEMENTS = 64
NUM_STEPS = 60
NUM_GROUPS, NUM_ROUNDS, NUM_STEPS_OF_ROUND = 300, 2, 40
SHRINKAGE = (
    4.0  # prior count of blocks, with which the overall probabilities enter those of a group
)


class Fit(NamedTuple):
    """
    - **params** - of the guide.
    - **mean** - of the blocks without noise, a column each.
    - **variance** - of each block, the mean over its pixels.
    """

    params: dict[str, Any]
    mean: np.ndarray
    variance: np.ndarray


class Denoised(NamedTuple):
    """
    - **images** - with one inclusion probability per element, and after each round with groups.
    - **first**, **last** - the fits of the first and the last image.
    """

    images: list[np.ndarray]
    first: Fit
    last: Fit


def photograph() -> np.ndarray:
    """A part of a photograph in grey, 0 to 255."""
    return load_sample_image("flower.jpg")[75:267, 170:362].mean(axis=2)


def grouped(X, Y, group, overall, noise):
    """The same model with inclusion probabilities of (group of blocks, element), and known noise.

    :param overall: those of all blocks, to which groups are shrunk.
    :param noise: its standard deviation.
    """
    (N, Q), M = np.shape(Y), len(overall)
    with numpyro.plate("group", NUM_GROUPS, dim=-2), numpyro.plate("latent", M, dim=-1):
        pi = numpyro.sample(
            "inclusion", dist.Beta(1 + SHRINKAGE * overall, 1 + SHRINKAGE * (1 - overall))
        )
    slab_scale = numpyro.sample("slab_scale", dist.HalfNormal(100.0))
    with numpyro.plate("latent", M):
        phi = nss.latent_functions("phi", "white", X)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", pi[group], slab_scale)
    with numpyro.plate("point", N, dim=-2), numpyro.plate("task", Q, dim=-1):
        numpyro.sample("Y", dist.Normal((W @ phi).T, noise), obs=Y)


def fit(svi: nss.CAVI, num_steps: int, params: dict[str, Any], *data: Any) -> Fit:
    """The dictionary and its use after some steps from given parameters."""
    with warnings.catch_warnings():
        # images are the same long before the bound stands still
        warnings.filterwarnings("ignore", "CAVI.run: the bound still moves")
        key = random.key(0)  # decides nothing, since all parameters are given
        params = svi.run(key, num_steps, *data, init_params=params, progress_bar=False).params
    mean, variance = svi.guide.predict(params, *data)
    return Fit(params, np.asarray(mean), np.asarray(variance).mean(axis=0))


def together(fitted: Fit, mean: np.ndarray, noise: float, shape: tuple[int, ...]) -> np.ndarray:
    """Make the image of the blocks of a fit.

    :param mean: means of the noisy blocks, which the model leaves out.
    """
    return image_of(fitted.mean + mean, 1 / (fitted.variance + noise**2 / SIZE**2), shape)


def denoise(noisy: np.ndarray, noise: float, seed: int = 0) -> Denoised:
    """Learn dictionary and inclusion probabilities, then these once more within groups.

    :param noise: its standard deviation. The dictionary is first learned without it.
    """
    blocks = blocks_of(noisy)
    mean = blocks.mean(axis=0)
    Y = jnp.asarray(blocks - mean, jnp.float32)
    model = nss.models.mtmkl(
        ["white"] * NUM_ELEMENTS,
        shared_noise=True,
        shared_inclusion=False,
        priors=dict.fromkeys(("noise", "slab_scale"), dist.HalfNormal(100.0)),
    )
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    params = first_params(random.key(seed), Y, NUM_ELEMENTS, noise, (NUM_ELEMENTS,))
    first = fitted = fit(svi, NUM_STEPS, params, PIXELS, Y)
    images = [together(fitted, mean, noise, noisy.shape)]
    overall = fitted.params["inclusion_auto_loc"]
    # blocks have less noise without their means
    noise_left = noise * (1 - 1 / SIZE**2) ** 0.5
    svi = nss.CAVI(grouped, nss.PairedGuide(grouped), plain=True)
    for _ in range(NUM_ROUNDS):
        group = alike(images[-1], seed)
        start = fitted.params | {"inclusion_auto_loc": jnp.tile(overall, (NUM_GROUPS, 1))}
        start.pop("noise_auto_loc", None)
        fitted = fit(svi, NUM_STEPS_OF_ROUND, start, PIXELS, Y, group, overall, noise_left)
        images.append(together(fitted, mean, noise, noisy.shape))
    return Denoised(images, first, fitted)


def alike(image: np.ndarray, seed: int) -> np.ndarray:
    """The group of each block, by k-means."""
    blocks = blocks_of(image)
    kmeans = KMeans(min(NUM_GROUPS, blocks.shape[1]), random_state=seed, n_init=1, max_iter=20)
    return kmeans.fit_predict((blocks - blocks.mean(axis=0)).T)


def denoise_as_in_the_paper(noisy: np.ndarray, noise: float, seed: int, kernel: Any) -> np.ndarray:
    """Blocks with their means, and one inclusion probability for all elements."""
    Y = jnp.asarray(blocks_of(noisy), jnp.float32)
    model = nss.models.mtmkl(
        [kernel] * NUM_ELEMENTS,
        shared_noise=True,
        priors=dict.fromkeys(("noise", "slab_scale"), dist.HalfNormal(100.0)),
    )
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    fitted = fit(svi, NUM_STEPS, first_params(random.key(seed), Y, NUM_ELEMENTS, noise), PIXELS, Y)
    return image_of(fitted.mean, 1 / fitted.variance, noisy.shape)


def dictionary(found: Fit) -> tuple[np.ndarray, np.ndarray]:
    """Elements in the order of their use, shape (M, SIZE, SIZE), and how many blocks use each."""
    use = np.sum(found.params["W_auto_probs"] > 0.5, axis=0)
    order = np.argsort(-use)
    elements = elements_of(found.params)[order]
    return elements.reshape(-1, SIZE, SIZE), use[order]


def plot(truth: np.ndarray, noisy: np.ndarray, found: Denoised) -> plt.Figure:
    """The images, and the dictionary in the order of use."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
    images = {"original": truth, "noisy": noisy, "denoised": found.images[-1]}
    for ax, (name, image) in zip(axes, images.items(), strict=False):
        ax.imshow(image, cmap="gray", vmin=0, vmax=255)
        ax.set_title(name if image is truth else f"{name}, {psnr(image, truth):.2f} dB")
    elements, _ = dictionary(found.last)
    axes[3].imshow(mosaic(elements, across=8), cmap="gray", vmin=-1, vmax=1)
    axes[3].set_title("dictionary, most used first")
    for ax in axes:
        ax.set_axis_off()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--noise", type=float, default=25.0, help="its standard deviation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", choices=("white", "exponential"))
    options = parser.parse_args()
    if options.paper is not None and options.folder is not None:
        parser.error("--paper makes no picture; leave the folder out")
    try:
        truth = photograph() if options.image is None else read(options.image)
    except OSError as error:
        parser.error(f"--image: {error}")
    truth = truth.mean(axis=2) if truth.ndim == 3 else truth
    rng = np.random.default_rng(options.seed)
    noisy = truth + options.noise * rng.normal(size=truth.shape)
    print(f"{blocks_of(noisy).shape[1]} blocks, noisy image {psnr(noisy, truth):.2f} dB")
    begin = time.perf_counter()
    if options.paper is not None:
        kernel = "white" if options.paper == "white" else Exp(8.0, distance=L2Distance())
        image = denoise_as_in_the_paper(noisy, options.noise, options.seed, kernel)
    else:
        denoised = denoise(noisy, options.noise, options.seed)
        image = denoised.images[-1]
        print("after the dictionary and each round of groups, dB:", end=" ")
        print(*(f"{psnr(x, truth):.2f}" for x in denoised.images))
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
            plot(truth, noisy, denoised).savefig(options.folder / "denoise.png", dpi=120)
    print(f"{time.perf_counter() - begin:.1f} s")
    print(f"PSNR {psnr(image, truth):.2f}")


if __name__ == "__main__":
    main()
