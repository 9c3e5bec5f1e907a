# SPDX-License-Identifier: Apache-2.0
"""Latent functions in a guide: the parameters of their factors, and their draws."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.distributions import constraints

from numpyro_spikeslab.distributions import GaussianFunctions
from numpyro_spikeslab.fitting.function_updates import moments
from numpyro_spikeslab.fitting.posterior import FunctionFactors
from numpyro_spikeslab.fitting.starts import STEP
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.sites import functions_of


def names(site: str, prefix: str) -> tuple[str, str]:
    """Names of the parameters, the precisions and the linear terms."""
    return f"{site}_{prefix}_precision", f"{site}_{prefix}_linear"


def start(site: str, shape: tuple[int, ...], prefix: str) -> dict[str, tuple[Any, Any]]:
    """Start value and constraint of each parameter."""
    precision, linear = names(site, prefix)
    return {
        precision: (jnp.ones(shape), constraints.nonnegative),
        linear: (jnp.zeros(shape), constraints.real),
    }


def _standard_normal(shape: tuple[int, ...], key: Array) -> Any:
    return random.normal(key, shape)


def sample(run: dict[str, Any], site: str, prefix: str) -> Float[Array, "M N"]:
    """Declare the parameters and sample the functions, within their plate.

    :param run: the model at values of its other sites.
    """
    functions = functions_of(run[site])
    shape = len(functions.templates), functions.num_inputs
    precision, linear = names(site, prefix)
    alpha = numpyro.param(precision, jnp.ones(shape), constraint=constraints.nonnegative)
    # a start at zero would be a saddle point of the weights and functions
    h = numpyro.param(linear, partial(_standard_normal, shape))
    kernels = functions.covariances(
        {name: run[name]["value"] for name in functions.parameters.sites}
    )
    mean = functions.mean_at(functions.X)
    return numpyro.sample(site, GaussianFunctions(kernels, mean, alpha, h))


def pack(reading: Reading, terms: Any, values: dict[str, Any]) -> FunctionFactors:
    """Make the factors of the functions that weights mix.

    :param terms: precisions and linear terms.
    :param values: of the other sites.
    """
    known = reading.functions
    assert known is not None
    known.check_prior("PairedGuide")
    theta = known.theta(values)
    given = known.parameters, known.kernel, known.mean, theta, *terms
    mean, variance, divergence, prior_variance = moments(*given)
    step = STEP * jnp.asarray(known.parameters.is_free, theta.dtype)
    factors = terms[0], terms[1], mean, variance, divergence, prior_variance, theta, step
    return FunctionFactors(*factors)
