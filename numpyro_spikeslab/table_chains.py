# SPDX-License-Identifier: Apache-2.0
"""The fit and the chains of a regression on a standardised table."""

from functools import partial
from typing import Any

import arviz_base
from jaxtyping import Array
import xarray as xr

import jax

from numpyro.infer import MCMC

from numpyro_spikeslab import models
from numpyro_spikeslab.fitting.cavi import CAVI
from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.reporting.variational import add_variational_stats
from numpyro_spikeslab.sampling.paired_gibbs import PairedGibbs

NUM_STEPS, TOLERANCE = 1000, 1e-3
"""Most steps of the fit, and the rise of the bound at which it stops."""

PROBABILITIES = "inclusion_probabilities.w"


def fit(
    key: Array, data: tuple[Array, Array], prior: tuple[float, float], num_chains: int
) -> xr.DataTree:
    """Return draws of a fit by CAVI, a thousand or as many as there are chains to start."""
    model = models.sparse_regression(inclusion=prior)
    svi = CAVI(model, PairedGuide(model))
    result = svi.run(key, NUM_STEPS, *data, tol=TOLERANCE, progress_bar=False)
    draws = arviz_base.from_numpyro_svi(
        svi, svi_result=result, model_args=data, num_samples=max(1000, num_chains)
    )
    return add_variational_stats(draws, svi, result, data)


@partial(jax.jit, static_argnums=(4, 5))
def chains(
    keys: Array,
    starts: dict[str, Any],
    data: tuple[Array, Array],
    prior: tuple[Any, Any],
    num_warmup: int,
    num_samples: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw each chain with its inclusion probabilities, in one program: MCMC compiles longer."""
    model = models.sparse_regression(inclusion=prior)

    def chain(inputs):
        key, start = inputs
        kernel = PairedGibbs(model)
        mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
        mcmc.run(key, *data, init_params=start, extra_fields=(PROBABILITIES,))
        return mcmc.get_samples(), mcmc.get_extra_fields()

    return jax.lax.map(chain, (keys, starts))
