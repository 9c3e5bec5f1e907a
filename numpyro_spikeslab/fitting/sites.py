# SPDX-License-Identifier: Apache-2.0
"""The sites of latent functions in a guide: their parameters and their draws."""

from functools import partial
from typing import Any

from jaxtyping import Array

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.distributions import constraints

from numpyro_spikeslab.distributions import GaussianFunctions
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, Functions


def _standard_normal(shape: tuple[int, ...], key: Array) -> Any:
    return random.normal(key, shape)


def start_site(names: tuple[str, str], shape: tuple[int, ...]) -> dict[str, tuple[Any, Any]]:
    """Start value and constraint of the precisions and linear terms of functions.

    :param names: of the two parameters.
    :param shape: (M, N).
    """
    precision, linear = names
    return {
        precision: (jnp.ones(shape), constraints.nonnegative),
        linear: (jnp.zeros(shape), constraints.real),
    }


def sample_site(name: str, names: tuple[str, str], model: dict[str, Any], plate: str) -> Any:
    """Declare the parameters of the functions ``name`` and sample them.

    :param model: a trace at the values of all other sites.
    :param plate: name of the plate of the functions.
    """
    functions: Functions = model[name]["infer"][FUNCTIONS_MARK]
    M, N = len(functions.templates), functions.num_inputs
    precision, linear = names
    alpha = numpyro.param(precision, jnp.ones((M, N)), constraint=constraints.nonnegative)
    # a start at zero would be a saddle point of the weights and functions
    h = numpyro.param(linear, partial(_standard_normal, (M, N)))
    parameters = {site: model[site]["value"] for site in functions.site_names}
    mu = functions.mean_at(functions.X)
    posterior = GaussianFunctions(functions.covariances(parameters), mu, alpha, h)
    with numpyro.plate(plate, M, dim=-1):
        return numpyro.sample(name, posterior)
