# SPDX-License-Identifier: Apache-2.0
"""Factors of a fit, weights and latent functions, and their matching.

A function and its weights give the fit ``w phi^T``, which does not change when two functions
change places, or a function its sign together with its weights.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np
from scipy.optimize import linear_sum_assignment


class Factors(NamedTuple):
    """Weights of M latent functions and the functions, of S draws.

    The data determine only their products. Functions of length one, as ``normalised`` makes them,
    leave the scale of both to the weights, so that averages and strengths mean the same in all
    draws.
    """

    W: Float[np.ndarray, "S M Q"]
    phi: Float[np.ndarray, "S M N"]

    def normalised(self) -> "Factors":
        """The same products, of functions of length one."""
        length = np.linalg.norm(self.phi, axis=2, keepdims=True)
        return Factors(self.W * length, self.phi / np.where(length > 0, length, 1))

    def mean(self) -> "Factors":
        """One draw: the mean of weights and of functions."""
        return Factors(*(x.mean(axis=0, keepdims=True) for x in self))

    def relabelled(self, labels: "Labels") -> "Factors":
        """The same draws with their functions in other places."""
        order, sign = labels.order[..., None], labels.sign[..., None]
        return Factors(*(sign * np.take_along_axis(x, order, axis=1) for x in self))


class Labels(NamedTuple):
    """New places of latent functions.

    - **order** - which function of a draw takes each place.
    - **sign** - by what it is multiplied.
    """

    order: Int[np.ndarray, "S M"]
    sign: Int[np.ndarray, "S M"]


def match(draws: Factors, reference: Factors, in_place: bool = False) -> Labels:
    """Labels that bring the products of weights and functions nearest to those of a reference.

    The squared distance of two such products is that of the matrices ``w phi^T``, so scales and
    signs that weights and functions exchange do not matter.

    :param in_place: whether all functions stay where they are, and signs alone are matched.
    """
    W, phi = reference.W[0], reference.phi[0]
    products = (draws.W @ W.T) * (draws.phi @ phi.T)  # of function m with the place k, (S, M, K)
    if in_place:
        products = np.broadcast_to(np.eye(len(W)), products.shape)
    order = np.stack([linear_sum_assignment(x.T, maximize=True)[1] for x in products])
    # Functions without weights fit everywhere equally well; in their old order nothing moves
    # without need.
    is_used = np.take_along_axis(draws.W.any(axis=2), order, axis=1)
    left = [np.sort(row[~used]) for row, used in zip(order, is_used, strict=True)]
    order[~is_used] = np.concatenate(left)
    placed = draws.relabelled(Labels(order, np.ones_like(order)))
    cosines = cosine(placed.W, W) + cosine(placed.phi, phi)
    # Signs of functions without weights are chance, and must not be made to agree.
    return Labels(order, np.where(is_used & (cosines < 0), -1, 1))


def cosine(x: Float[np.ndarray, "S M D"], y: Float[np.ndarray, "M D"]) -> Float[np.ndarray, "S M"]:
    """Cosines of the angles between rows, 0 where one is zero."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.einsum("smd,md->sm", x, y) / np.where(lengths > 0, lengths, 1)


def centre(draws: Factors, in_place: bool = False) -> Factors:
    """One draw to match all to: twice the mean of draws matched to the one before.

    The first is the draw whose fit, the sum of all products, is nearest to the mean of the fits.
    """
    mean = np.tensordot(draws.W, draws.phi, axes=([0, 1], [0, 1])) / len(draws.W)
    squares = np.sum((draws.W @ draws.W.mT) * (draws.phi @ draws.phi.mT), axis=(1, 2))
    products = np.sum((draws.W @ mean) * draws.phi, axis=(1, 2))
    first = np.argmin(squares - 2 * products)
    reference = Factors(*(x[first][None] for x in draws))
    for _ in range(2):
        reference = draws.relabelled(match(draws, reference, in_place)).mean()
    return reference


def strongest_first(reference: Factors, in_place: bool = False) -> Factors:
    """The same functions in the order of what they explain, their largest weights positive."""
    strength = np.linalg.norm(reference.W, axis=2)
    order = np.argsort(np.zeros_like(strength) if in_place else -strength, axis=1, kind="stable")
    largest = np.argmax(np.abs(reference.W), axis=2, keepdims=True)
    negative = np.take_along_axis(reference.W, largest, axis=2)[..., 0] < 0
    sign = np.where(np.take_along_axis(negative, order, axis=1), -1, 1)
    return reference.relabelled(Labels(order, sign))
