# SPDX-License-Identifier: Apache-2.0
"""Priors of the parameters of kernels."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.functions import Functions

KERNEL_PRIOR_SCALE = 2.0
"""Scale of the LogNormal prior of a kernel parameter; its median is the value in the kernel."""


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
    for site, paths, start in _parameters(functions):
        known.update(paths)
        # what names one function comes before what holds for all
        path = next((path for path in reversed(paths) if path in priors), None)
        event_dim = start.ndim - functions.alike
        if path is None:
            default = dist.LogNormal(jnp.log(start), KERNEL_PRIOR_SCALE)
            found[site] = default.to_event(event_dim)
        else:
            _check(where, path, priors[path], start.shape, event_dim)
            found[site] = _fitted(priors[path], start.shape, event_dim)
    if unknown := sorted(set(priors) - known):
        raise ValueError(
            f"{where}: `priors` has {unknown}, which no kernel has as a parameter to be learned. "
            f"Known are {sorted(known)}."
        )
    return found


def _parameters(functions: Functions) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Each site with the paths to what it holds, the most special last, and with its start."""
    templates = functions.templates
    if functions.alike:
        starts = [template.parameters for template in templates]
        for site, path in zip(functions.sites[0], starts[0], strict=True):
            yield site, (path,), jnp.stack([values[path] for values in starts])
        return
    for m, (template, sites) in enumerate(zip(templates, functions.sites, strict=True)):
        for site, (path, start) in zip(sites, template.parameters.items(), strict=True):
            yield site, (path, f"{m}_{path}"), start


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
