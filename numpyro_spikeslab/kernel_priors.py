# SPDX-License-Identifier: Apache-2.0
"""Priors of the parameters of kernels."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainccinv

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.latent import Functions

KERNEL_PRIOR_SCALE = 2.0
"""Scale of the LogNormal prior of a kernel parameter; its median is the value in the kernel."""

BELOW, ABOVE = 0.01, 0.05
"""Prior probability that a length scale is below the spacing of the inputs, where a function is
noise, and that it is above their extent, where it is nearly constant."""

MIN_RATIO = 10.0
"""Of the extent to the spacing. Inputs of many dimensions are far apart in each."""


def parameter_priors(
    functions: Functions, priors: Mapping[str, dist.Distribution]
) -> dict[str, dist.Distribution]:
    """Priors of the sites of the kernels' parameters, in the sites' order.

    :param functions: what defines the functions.
    :param priors: priors by the parameters' paths, for those that do not have the default.
    :return: for each site a prior whose batch shape is that of the functions, (M,), where their
        kernels are alike, else ().
    :raises ValueError: if a prior is of no parameter, not on positive numbers or of another shape.
    """
    where = f"latent_functions({functions.name!r})"
    found: dict[str, dist.Distribution] = {}
    known: set[str] = set()
    for site, paths, start, is_length in _parameters(functions):
        known.update(paths)
        # what names one function comes before what holds for all
        path = next((path for path in reversed(paths) if path in priors), None)
        event_dim = start.ndim - functions.alike
        if path is None:
            default = dist.LogNormal(jnp.log(start), KERNEL_PRIOR_SCALE)
            if is_length and functions.num_inputs > 1:
                default = length_scale_prior(functions.X)
            found[site] = default.expand(start.shape).to_event(event_dim)
        else:
            _check(where, path, priors[path], start.shape, event_dim)
            found[site] = _fitted(priors[path], start.shape, event_dim)
    if unknown := sorted(set(priors) - known):
        raise ValueError(
            f"{where}: `priors` has {unknown}, which no kernel has as a parameter to be learned. "
            f"Known are {sorted(known)}."
        )
    return found


def start_values(functions: Functions) -> dict[str, Any]:
    """The values in the kernels, by the names of their sites."""
    return {site: start for site, _, start, _ in _parameters(functions)}


def length_scale_prior(X: Any) -> dist.Distribution:
    """An InverseGamma distribution with little mass below the spacing of inputs and above their
    extent; see :data:`BELOW`.

    :param X: inputs, shape (N,) or (N, D).
    """
    X = jnp.reshape(jnp.asarray(X, float), (np.shape(X)[0], -1))
    N, D = X.shape
    extent = jnp.linalg.norm(jnp.max(X, axis=0) - jnp.min(X, axis=0))
    ratio = max(N ** (1 / D) - 1, MIN_RATIO)
    concentration, rate = _inverse_gamma(ratio)
    return dist.InverseGamma(concentration, rate * jnp.where(extent > 0, extent, 1.0) / ratio)


@lru_cache
def _inverse_gamma(ratio: float) -> tuple[float, float]:
    """Concentration and rate with the tails below 1 and above ``ratio``."""

    def excess(concentration):
        low, high = gammainccinv(concentration, (BELOW, 1 - ABOVE))
        return np.log(low / high / ratio)

    concentration = brentq(excess, 0.05, 100.0)
    return concentration, float(gammainccinv(concentration, BELOW))


def _parameters(functions: Functions) -> Iterator[tuple[str, tuple[str, ...], Any, bool]]:
    """Each site with the paths to what it holds, the most special last, with its start, and whether
    it is a length scale."""
    templates = functions.templates
    if functions.alike:
        starts = [template.parameters for template in templates]
        for site, path in zip(functions.sites[0], starts[0], strict=True):
            start = jnp.stack([values[path] for values in starts])
            yield site, (path,), start, path in templates[0].length_scales
        return
    for m, (template, sites) in enumerate(zip(templates, functions.sites, strict=True)):
        for site, (path, start) in zip(sites, template.parameters.items(), strict=True):
            yield site, (path, f"{m}_{path}"), start, path in template.length_scales


def _check(where: str, path: str, prior: Any, shape: tuple[int, ...], event_dim: int) -> None:
    """Raise unless a prior fits a site of this shape."""
    if not isinstance(prior, dist.Distribution):
        raise ValueError(
            f"{where}: the prior of {path!r} must be a distribution of NumPyro, got "
            f"{type(prior).__name__}. To hold a parameter, condition on its site."
        )
    if not _is_positive(prior.support):
        raise ValueError(
            f"{where}: the prior of {path!r}, {type(prior).__name__}, is not on the positive "
            "numbers, and parameters of kernels are positive. Take LogNormal, InverseGamma or "
            "HalfNormal, for example, or `TruncatedDistribution(prior, low=0.0)`."
        )
    try:
        fits = jnp.broadcast_shapes(prior.shape(), shape) == shape
    except ValueError:
        fits = False
    if (
        not fits
        or prior.event_dim > event_dim
        or not shape[len(shape) - prior.event_dim :] == (prior.event_shape)
    ):
        raise ValueError(
            f"{where}: the prior of {path!r} has shape {prior.shape()}, which does not fit the "
            f"site's shape {shape}."
        )


def _fitted(prior: Any, shape: tuple[int, ...], event_dim: int) -> dist.Distribution:
    own = prior.event_dim
    return prior.expand(shape[: len(shape) - own]).to_event(event_dim - own)


def _is_positive(support: Any) -> bool:
    """Whether a support has real numbers that are not negative."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    low = getattr(support, "lower_bound", None)
    if low is None or support.is_discrete:
        return False
    return not not_jax_tracer(low) or bool(np.all(np.asarray(low) >= 0))
