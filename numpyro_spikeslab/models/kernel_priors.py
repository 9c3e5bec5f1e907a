# SPDX-License-Identifier: Apache-2.0
"""Priors of the parameters of kernels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.models.functions import Functions, user_of
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import bounds

KERNEL_PRIOR_SCALE = 2.0
"""Scale of the LogNormal prior of a kernel parameter; its median is the value in the kernel."""

BELOW, ABOVE = 0.01, 0.05
"""Prior probabilities that a length scale is below the spacing of the inputs, where a function is
noise, and above their extent, where it is nearly constant."""

MIN_RATIO = 10.0
"""Least ratio of the extent to the spacing. Inputs of many dimensions are far from each other."""


def parameter_priors(
    functions: Functions, priors: Mapping[str, dist.Distribution]
) -> dict[str, dist.Distribution]:
    """Priors of the sites of the kernels' parameters: those of ``priors``, by path, or defaults."""
    user, starts, result = f"{user_of(functions.name)}: priors", _starts(functions), {}
    for site, (paths, value, is_length) in starts.items():
        event_dim = value.ndim - functions.parameters.are_shared
        path = next((path for path in reversed(paths) if path in priors), None)
        if path is not None:
            result[site] = _fitted(f"{user}[{path!r}]", priors[path], value.shape, event_dim)
            continue
        default = dist.LogNormal(jnp.log(value), KERNEL_PRIOR_SCALE)
        if is_length and functions.num_inputs > 1:
            default = length_scale_prior(functions.X)
        result[site] = default.expand(value.shape).to_event(event_dim)
    names = {path for paths, _, _ in starts.values() for path in paths}
    if unknown := sorted(set(priors) - names):
        raise bad(user, unknown, f"parameters of the kernels, {sorted(names)}")
    return result


def start_values(functions: Functions) -> dict[str, Any]:
    """The values in the kernels, by the names of their sites."""
    return {site: value for site, (_, value, _) in _starts(functions).items()}


def _starts(functions: Functions) -> dict[str, tuple[tuple[str, ...], Any, bool]]:
    """Names of the prior of each site, the most special last, its value in the kernels, and whether
    it is a length scale."""
    starts: dict[str, tuple[tuple[str, ...], Any, bool]] = {}
    rows = functions.parameters.rows
    for m, (template, row) in enumerate(zip(functions.templates, rows, strict=True)):
        for (path, value), (site, entry, _) in zip(template.parameters.items(), row, strict=True):
            paths: tuple[str, ...] = (path,)
            if entry is None:
                paths = path, f"{m}_{path}"
            elif site in starts:
                continue
            else:
                value = jnp.stack([t.parameters[path] for t in functions.templates])
            starts[site] = paths, value, path in template.length_scales
    return starts


def length_scale_prior(X: Any) -> dist.Distribution:
    """A LogNormal distribution with little mass below the spacing of inputs and above their extent;
    see :data:`BELOW`."""
    X = jnp.reshape(jnp.asarray(X, float), (np.shape(X)[0], -1))
    N, D = X.shape
    extent = jnp.linalg.norm(jnp.max(X, axis=0) - jnp.min(X, axis=0))
    low, high = ndtri(BELOW), ndtri(1 - ABOVE)
    scale = np.log(max(N ** (1 / D) - 1, MIN_RATIO)) / (high - low)
    return dist.LogNormal(jnp.log(jnp.where(extent > 0, extent, 1.0)) - high * scale, scale)


def _fitted(what: str, prior: Any, shape: tuple[int, ...], event_dim: int) -> dist.Distribution:
    """Return a prior expanded to the shape of its site."""
    if not isinstance(prior, dist.Distribution):
        remedy = "To hold a parameter, condition on its site."
        raise bad(what, type(prior).__name__, "a distribution of NumPyro", remedy)
    low = (bounds(prior.support) or (-np.inf, None))[0]
    if not_jax_tracer(low) and not np.all(np.asarray(low) >= 0):
        remedy = "Take LogNormal, InverseGamma or `TruncatedDistribution(prior, low=0.0)`."
        raise bad(what, type(prior).__name__, "a prior on the positive numbers", remedy)
    batch = shape[: len(shape) - prior.event_dim]
    try:
        fits = jnp.broadcast_shapes(prior.batch_shape, batch) + prior.event_shape == shape
    except ValueError:
        fits = False
    if not fits or prior.event_dim > event_dim:
        got = f"batch and event shape {prior.batch_shape}, {prior.event_shape}"
        raise bad(what, got, f"one that fits the site's shape {shape}")
    return prior.expand(batch).to_event(event_dim - prior.event_dim)
