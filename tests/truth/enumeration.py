# SPDX-License-Identifier: Apache-2.0
"""Exact posteriors of regressions, by sums over all models.

Everything here is numpy in float64, written from the definition of the model.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import logsumexp, softmax


class Regression(NamedTuple):
    """``y_n ~ N(x_n w, scale_n^2)``, each counted ``weight_n`` times; a spike-and-slab prior."""

    X: np.ndarray
    y: np.ndarray
    scale: np.ndarray
    inclusion: np.ndarray
    slab_scale: np.ndarray
    weight: np.ndarray


def regression(X, y, scale, inclusion, slab_scale, weight=1.0) -> Regression:
    """Broadcasts everything to the N observations and the P weights."""
    X, y = np.asarray(X, float), np.asarray(y, float)
    scale, weight = (np.broadcast_to(np.asarray(x, float), y.shape) for x in (scale, weight))
    of_weights = (np.broadcast_to(np.asarray(x, float), len(X.T)) for x in (inclusion, slab_scale))
    return Regression(X, np.where(weight > 0, y, 0.0), scale, *of_weights, weight)


class Posterior(NamedTuple):
    """All 2^P models of a regression: their spikes and, given those, the Normal of the slabs."""

    log_evidence: float
    models: np.ndarray  # (2^P, P)
    log_probs: np.ndarray  # (2^P,)
    locs: np.ndarray  # (2^P, P)
    covariances: np.ndarray  # (2^P, P, P)

    @property
    def probs(self) -> np.ndarray:
        return np.exp(self.log_probs)

    @property
    def inclusion(self) -> np.ndarray:
        return self.probs @ self.models

    @property
    def mean(self) -> np.ndarray:
        return self.probs @ (self.models * self.locs)

    @property
    def second_moments(self) -> np.ndarray:
        """``<w w^T>``."""
        of_slabs = self.locs[:, :, None] * self.locs[:, None, :] + self.covariances
        return np.einsum("s,si,sj,sij->ij", self.probs, self.models, self.models, of_slabs)

    @property
    def variance(self) -> np.ndarray:
        return np.diag(self.second_moments) - self.mean**2

    def sample(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Independent exact draws of the spikes and the slabs, each of shape (size, P)."""
        which = rng.choice(len(self.probs), size=size, p=self.probs)
        roots = np.linalg.cholesky(self.covariances)
        normal = rng.normal(size=(size, self.models.shape[1]))
        slabs = self.locs[which] + np.einsum("nij,nj->ni", roots[which], normal)
        return self.models[which].astype(int), slabs


def enumerate_models(problem: Regression) -> Posterior:
    """The exact posterior, by summing over all 2^P models."""
    X, y, scale, inclusion, slab_scale, weight = problem
    size = X.shape[1]
    root_tau = np.sqrt(weight) / scale
    # products of nearly equal columns would lose their differences to rounding
    rows = np.linalg.qr(np.column_stack([X * slab_scale, y]) * root_tau[:, None], mode="r")
    models = np.array(list(product((0.0, 1.0), repeat=size)))
    # in units of the slab's scale; where the spike is 0 the slab has its prior, N(0, 1)
    features = np.concatenate([rows[:, :-1] * models[:, None, :], [np.eye(size)] * len(models)], 1)
    target = np.concatenate([rows[:, -1], np.zeros(size)])
    target = np.broadcast_to(target[:, None], (*features.shape[:2], 1))
    R = np.linalg.qr(np.concatenate([features, target], axis=2), mode="r")
    inverse, residual = np.linalg.inv(R[:, :size, :size]), R[:, size, size]
    locs = np.einsum("sij,sj->si", inverse, R[:, :size, size])
    covariances = inverse @ np.swapaxes(inverse, 1, 2)
    log_joint = (
        -0.5 * np.sum(weight * np.log(2 * np.pi * scale**2))
        - 0.5 * residual**2
        + np.linalg.slogdet(inverse)[1]
        + models @ np.log(inclusion)
        + (1 - models) @ np.log1p(-inclusion)
    )
    log_evidence = logsumexp(log_joint)
    covariances = covariances * slab_scale[:, None] * slab_scale
    log_probs = log_joint - log_evidence
    return Posterior(float(log_evidence), models, log_probs, locs * slab_scale, covariances)


def share_spikes(posterior: Posterior, groups) -> Posterior:
    """The posterior if weights of a group share their spike.

    In ``posterior`` all but the first member of each group must have an inclusion of a half.
    """
    groups = np.asarray(groups)
    _, firsts = np.unique(groups, return_index=True)
    same = np.all(posterior.models == posterior.models[:, firsts][:, groups], axis=1)
    _, models, log_probs, locs, covariances = (
        np.compress(same, x, axis=0) if np.ndim(x) else x for x in posterior
    )
    total = logsumexp(log_probs)
    log_evidence = posterior.log_evidence + total + (len(groups) - len(firsts)) * np.log(2)
    return Posterior(float(log_evidence), models, log_probs - total, locs, covariances)


def sum_over_scales(at: Callable, grid: Iterable, log_prior: Callable) -> np.ndarray:
    """Inclusion, means of the weights and means of scales that are unknown, one behind the other.

    :param at: the regression at a point of the grid of scales.
    :param log_prior: of all models (2^P, P) and a point, beside the regression's own.
    """
    logs, sums = [], []
    for point in grid:
        exact = enumerate_models(at(*point))
        logs.append(exact.log_evidence + exact.log_probs + log_prior(exact.models, *point))
        scales = np.broadcast_to(point, (len(exact.models), len(point)))
        sums.append(np.hstack([exact.models, exact.models * exact.locs, scales]))
    return softmax(np.concatenate(logs)) @ np.concatenate(sums)


def check_draws(exact: Posterior, spikes, slabs, probs=None) -> None:
    """Compare independent draws, and Rao-Blackwellised probabilities, with the posterior: each
    moment at a level of 1e-5."""
    size, numbers = len(spikes), 2 ** np.arange(spikes.shape[1])[::-1]
    counts = np.bincount(spikes @ numbers, minlength=2 * numbers[0])
    counts = counts[(exact.models @ numbers).astype(int)]
    assert counts.sum() == size
    # rare models count with the most probable one
    expected = size * exact.probs
    cells = np.where(expected > 5, np.arange(len(expected)), expected.argmax())
    counts, expected = np.bincount(cells, counts), np.bincount(cells, expected)
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-5
    # what is rarely included together has no normal error
    often = np.einsum("s,si,sj->ij", exact.probs, exact.models, exact.models) > 0.02
    w, variances = spikes * slabs, np.diagonal(exact.covariances, 0, 1, 2)
    moments = [
        (w, exact.mean),
        ((w[:, :, None] * w[:, None])[:, often], exact.second_moments[often]),
        (slabs, exact.probs @ exact.locs),
        (slabs**2, exact.probs @ (exact.locs**2 + variances)),
    ]
    for draws, mean in moments if probs is None else [*moments, (probs, exact.inclusion)]:
        draws = np.asarray(draws, float)
        bound = stats.norm.isf(1e-5 / 2) * draws.std(axis=0) / np.sqrt(size)
        floor = 1e-12 if slabs.dtype == float else 1e-5
        assert np.all(np.abs(draws.mean(axis=0) - mean) < bound + floor)


def agrees(draws: np.ndarray, expected: np.ndarray) -> bool:
    """Whether means of independent draws agree; a false alarm in 1 of a million comparisons."""
    error = draws.std(axis=0) / np.sqrt(len(draws))
    return bool(np.all(np.abs(draws.mean(axis=0) - expected) < 4.9 * error + 1e-5))
