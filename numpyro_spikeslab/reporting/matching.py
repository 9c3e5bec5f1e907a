# SPDX-License-Identifier: Apache-2.0
"""Matching of latent functions and their weights between draws.

The fit ``W phi`` is invariant to permutations of the functions, and to the sign of a function
together with its weights.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np
from scipy.optimize import linear_sum_assignment


class Factors(NamedTuple):
    """Weights of M latent functions and the functions, of S draws.

    The data determine only their products. ``normalised`` scales functions to length one, so that
    averages and strengths are comparable between draws.
    """

    W: Float[np.ndarray, "S M Q"]
    phi: Float[np.ndarray, "S M N"]

    def normalised(self) -> "Factors":
        """Scale the functions to length one, and the weights so that the products stay."""
        length = np.linalg.norm(self.phi, axis=2, keepdims=True)
        return Factors(self.W * length, self.phi / np.where(length > 0, length, 1))

    def mean(self) -> "Factors":
        """Average weights and functions over the draws, as one draw."""
        return Factors(*(x.mean(axis=0, keepdims=True) for x in self))

    def moved(self, places: "Places") -> "Factors":
        """Put the functions of each draw into other places."""
        order, sign = places.order[..., None], places.sign[..., None]
        return Factors(*(sign * np.take_along_axis(x, order, axis=1) for x in self))


class Places(NamedTuple):
    """Permutation and signs of the latent functions of each draw.

    - **order** - the function of the draw that takes each place.
    - **sign** - its factor, 1 or -1.
    """

    order: Int[np.ndarray, "S M"]
    sign: Int[np.ndarray, "S M"]


def match(draws: Factors, reference: Factors, in_place: bool = False) -> Places:
    """Match the products ``w_m phi_m^T`` of each draw to a reference.

    The assignment minimises the sum of squared distances between the matrices. They are invariant
    to scales and signs that weights and functions exchange. Functions without weights match all
    places equally well: they keep their order and their signs.

    :param in_place: whether functions keep their places, and only signs are matched.
    """
    W, phi = reference.W[0], reference.phi[0]
    products = (draws.W @ W.T) * (draws.phi @ phi.T)  # of function m with the place k, (S, M, K)
    if in_place:
        products = np.broadcast_to(np.eye(len(W)), products.shape)
    order = np.stack([linear_sum_assignment(x.T, maximize=True)[1] for x in products])
    is_used = np.take_along_axis(draws.W.any(axis=2), order, axis=1)
    unused = [np.sort(row[~used]) for row, used in zip(order, is_used, strict=True)]
    order[~is_used] = np.concatenate(unused)
    placed = draws.moved(Places(order, np.ones_like(order)))
    cosines = cosine(placed.W, W) + cosine(placed.phi, phi)
    return Places(order, np.where(is_used & (cosines < 0), -1, 1))


def cosine(x: Float[np.ndarray, "S M D"], y: Float[np.ndarray, "M D"]) -> Float[np.ndarray, "S M"]:
    """Compute the cosines of the angles between rows; 0 if one is zero."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.einsum("smd,md->sm", x, y) / np.where(lengths > 0, lengths, 1)


def centre(draws: Factors, in_place: bool = False) -> Factors:
    """Compute a reference for all draws: their mean after matching, twice.

    The first reference is the draw whose fit ``sum_m w_m phi_m^T`` is nearest to the mean fit.
    """
    mean = np.tensordot(draws.W, draws.phi, axes=([0, 1], [0, 1])) / len(draws.W)
    squares = np.sum((draws.W @ draws.W.mT) * (draws.phi @ draws.phi.mT), axis=(1, 2))
    products = np.sum((draws.W @ mean) * draws.phi, axis=(1, 2))
    first = np.argmin(squares - 2 * products)
    reference = Factors(*(x[first][None] for x in draws))
    for _ in range(2):
        reference = draws.moved(match(draws, reference, in_place)).mean()
    return reference


def strongest_first(reference: Factors, in_place: bool = False) -> Factors:
    """Sort functions by strength, and make their largest weights positive."""
    strength = np.linalg.norm(reference.W, axis=2)
    order = np.argsort(np.zeros_like(strength) if in_place else -strength, axis=1, kind="stable")
    largest = np.argmax(np.abs(reference.W), axis=2, keepdims=True)
    negative = np.take_along_axis(reference.W, largest, axis=2)[..., 0] < 0
    sign = np.where(np.take_along_axis(negative, order, axis=1), -1, 1)
    return reference.moved(Places(order, sign))
