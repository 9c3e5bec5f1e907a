# SPDX-License-Identifier: Apache-2.0
"""Priors of the parameters of kernels."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainccinv

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.latent import Functions, user_of
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.priors import bounds

KERNEL_PRIOR_SCALE = 2.0
"""Scale of the LogNormal prior of a kernel parameter; its median is the value in the kernel."""

BELOW, ABOVE = 0.01, 0.05
"""Prior probabilities that a length scale is below the spacing of the inputs, where a function is
noise, and above their extent, where it is nearly constant."""

MIN_RATIO = 10.0
"""Least ratio of the extent to the spacing. Inputs of many dimensions are far from each other."""


class Start(NamedTuple):
    """A site of kernel parameters.

    - **paths** - names of its prior in the argument ``priors``, the most special last.
    - **value** - its value in the kernels.
    - **is_length** - whether it is a length scale.
    """

    paths: tuple[str, ...]
    value: Any
    is_length: bool


def parameter_priors(
    functions: Functions, priors: Mapping[str, dist.Distribution]
) -> dict[str, dist.Distribution]:
    """Priors of the sites of the kernels' parameters, in the order of the sites.

    :param priors: priors by the parameters' paths; the others have the default.
    :return: for each site a prior with the batch shape (M,) where sites have an entry for each
        function, else ().
    :raises ValueError: if a prior is of no parameter, not on positive numbers or of another shape.
    """
    starts, result = _starts(functions), {}
    for site, (paths, value, is_length) in starts.items():
        path = next((path for path in reversed(paths) if path in priors), None)
        event_dim = value.ndim - functions.parameters.are_shared
        if path is not None:
            prior = priors[path]
            _check(f"{user_of(functions.name)}: priors[{path!r}]", prior, value.shape, event_dim)
            batch = value.shape[: value.ndim - prior.event_dim]
            result[site] = prior.expand(batch).to_event(event_dim - prior.event_dim)
            continue
        default = dist.LogNormal(jnp.log(value), KERNEL_PRIOR_SCALE)
        if is_length and functions.num_inputs > 1:
            default = length_scale_prior(functions.X)
        result[site] = default.expand(value.shape).to_event(event_dim)
    names = {path for start in starts.values() for path in start.paths}
    if unknown := sorted(set(priors) - names):
        expected = f"parameters of the kernels, {sorted(names)}"
        raise bad(f"{user_of(functions.name)}: priors", unknown, expected)
    return result


def start_values(functions: Functions) -> dict[str, Any]:
    """The values in the kernels, by the names of their sites."""
    return {site: start.value for site, start in _starts(functions).items()}


def _starts(functions: Functions) -> dict[str, Start]:
    starts: dict[str, Start] = {}
    for m, template in enumerate(functions.templates):
        values, lengths = template.parameters, template.length_scales
        for parameter, (path, value) in zip(
            functions.parameters.rows[m], values.items(), strict=True
        ):
            if parameter.entry is None:
                starts[parameter.site] = Start((path, f"{m}_{path}"), value, path in lengths)
            elif m == 0:
                shared = jnp.stack([t.parameters[path] for t in functions.templates])
                starts[parameter.site] = Start((path,), shared, path in lengths)
    return starts


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


def _check(what: str, prior: Any, shape: tuple[int, ...], event_dim: int) -> None:
    """Raise unless a prior fits a site of this shape."""
    if not isinstance(prior, dist.Distribution):
        remedy = "To hold a parameter, condition on its site."
        raise bad(what, type(prior).__name__, "a distribution of NumPyro", remedy)
    low = (bounds(prior.support) or (-np.inf, None))[0]
    if not_jax_tracer(low) and not np.all(np.asarray(low) >= 0):
        raise bad(
            what,
            type(prior).__name__,
            "a prior on the positive numbers",
            "Take LogNormal, InverseGamma, HalfNormal or `TruncatedDistribution(prior, low=0.0)`.",
        )
    try:
        fits = jnp.broadcast_shapes(prior.shape(), shape) == shape
    except ValueError:
        fits = False
    event = shape[len(shape) - prior.event_dim :]
    if not fits or prior.event_dim > event_dim or event != prior.event_shape:
        raise bad(
            what,
            f"batch and event shape {prior.batch_shape}, {prior.event_shape}",
            f"one that fits the site's shape {shape}",
        )
