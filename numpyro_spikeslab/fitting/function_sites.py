# SPDX-License-Identifier: Apache-2.0
"""Latent functions in a guide: the parameters of their factors, and their draws."""

from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.distributions import constraints

from numpyro_spikeslab.fitting.function_updates import factors_given
from numpyro_spikeslab.fitting.posterior import FunctionFactors
from numpyro_spikeslab.models.distributions import GaussianFunctions
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.sites import functions_of


def names(site: str, prefix: str) -> tuple[str, str]:
    """Return the names of the parameters, the precisions and the linear terms."""
    return f"{site}_{prefix}_precision", f"{site}_{prefix}_linear"


def start(site: str, shape: tuple[int, ...], prefix: str) -> dict[str, tuple[Any, Any]]:
    """Return start value and constraint of each parameter."""
    precision, linear = names(site, prefix)
    return {
        precision: (jnp.ones(shape), constraints.nonnegative),
        linear: (jnp.zeros(shape), constraints.real),
    }


def sample(run: dict[str, Any], site: str, prefix: str) -> Float[Array, "M N"]:
    """Declare the parameters and sample the functions, given a run of the model without them."""
    functions = functions_of(run[site])
    shape = len(functions.templates), functions.num_inputs
    precision, linear = names(site, prefix)
    alpha = numpyro.param(precision, jnp.ones(shape), constraint=constraints.nonnegative)
    # a start at zero would be a saddle point of the weights and functions
    h = numpyro.param(linear, lambda key: random.normal(key, shape))
    values = {name: run[name]["value"] for name in functions.parameters.sites}
    kernels, mean = functions.covariances(values), functions.mean_at(functions.X)
    return numpyro.sample(site, GaussianFunctions(kernels, mean, alpha, h))


def pack(reading: Reading, terms: Any, values: dict[str, Any]) -> FunctionFactors:
    """Make the factors of the functions from precisions and linear terms, and other sites."""
    prior = reading.functions
    assert prior is not None
    prior.check_prior("PairedGuide")
    theta = prior.theta(values)
    return factors_given(prior.prior({}), theta, *terms)
