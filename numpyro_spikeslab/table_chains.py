# SPDX-License-Identifier: Apache-2.0
"""The fit and the chains of a regression on a standardised table."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import arviz_base
from jaxtyping import Array
import numpy as np
import xarray as xr

import jax
import jax.numpy as jnp

from numpyro.infer import MCMC, NUTS, Gibbs

from numpyro_spikeslab import models
from numpyro_spikeslab.fitting.cavi import CAVI
from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.reporting.variational import add_variational_stats
from numpyro_spikeslab.responses import response_kind
from numpyro_spikeslab.sampling.paired_gibbs import PairedGibbs

NUM_STEPS, TOLERANCE = 1000, 1e-3
"""Most steps of the fit, and the rise of the bound at which it stops."""

PROBABILITIES = "inclusion_probabilities.w"


class TableModel(NamedTuple):
    """What compiled code for a regression depends on."""

    likelihood: str
    groups: tuple[int, ...] | None

    def at(self, prior: dict[str, Any]) -> Callable:
        """Return the model with ``inclusion`` or ``probabilities``."""
        return models.sparse_regression(**self._asdict(), **prior)


def start(
    key: Array, table_model: TableModel, data: tuple, prior: dict[str, Any], num_chains: int
) -> tuple[dict[str, Any], xr.DataTree | None]:
    """Return values at which chains start, and the fit that they are draws of, if there is one."""
    kind = response_kind(table_model.likelihood)
    if kind.start is None:
        fitted = fit(key, table_model, data, prior, num_chains)
        draws = posterior(fitted).isel(sample=slice(num_chains))
        return {str(name): x.values for name, x in draws.items() if name != "w"}, fitted
    X, y, always, offset, _ = data
    intercept = kind.start(
        np.asarray(y), np.zeros(len(y)) if offset is None else np.asarray(offset)
    )
    starts: dict[str, Any] = {"intercept": intercept, "w_spike": np.zeros(X.shape[1], int)}
    if always is not None:
        starts["always"] = np.zeros(always.shape[1])
    return {name: np.stack([x] * num_chains) for name, x in starts.items()}, None


def fit(
    key: Array, table_model: TableModel, data: tuple, prior: dict[str, Any], num_chains: int
) -> xr.DataTree:
    """Return draws of a fit by CAVI, a thousand or as many as there are chains to start."""
    model = table_model.at(prior)
    svi = CAVI(model, PairedGuide(model))
    result = svi.run(key, NUM_STEPS, *data, tol=TOLERANCE, progress_bar=False)
    draws = arviz_base.from_numpyro_svi(
        svi, svi_result=result, model_args=data, num_samples=max(1000, num_chains)
    )
    return add_variational_stats(draws, svi, result, data)


@partial(jax.jit, static_argnums=(2, 5, 6))
def chains(
    keys: Array,
    starts: dict[str, Any],
    table_model: TableModel,
    data: tuple,
    prior: dict[str, Any],
    num_warmup: int,
    num_samples: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw each chain with its inclusion probabilities, in one program: MCMC compiles longer.

    :param starts: values of sites at which chains start.
    """
    model = table_model.at(prior)
    free = response_kind(table_model.likelihood).free_sites

    def chain(inputs):
        key, start = inputs
        kernel, field = PairedGibbs(model), PROBABILITIES
        if free:
            ours = [name for name in start if name not in free]
            kernel, field = Gibbs([(kernel, ours), (NUTS(model), free)]), f"block_states.0.{field}"
            # NUTS starts at unconstrained values, and all these sites are positive
            start |= {name: jnp.log(start[name]) for name in free}
        mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
        mcmc.run(key, *data, init_params=start, extra_fields=(field,))
        return mcmc.get_samples(), {PROBABILITIES: mcmc.get_extra_fields()[field]}

    return jax.lax.map(chain, (keys, starts))


def sampled(keys: Array, starts: dict[str, Any], table_model: TableModel, *arguments: Any) -> Any:
    """Return the draws of :func:`chains` as ArviZ data."""
    draws = jax.device_get(chains(keys, starts, table_model, *arguments))
    spike = "feature" if table_model.groups is None else "group"
    dims = {name: ["feature"] for name in ("w", "w_slab", PROBABILITIES)}
    dims |= {"w_spike": [spike], "always": ["always_feature"]}
    groups = dict(zip(("posterior", "sample_stats"), draws, strict=True))
    return arviz_base.from_dict(groups, dims=dims)
