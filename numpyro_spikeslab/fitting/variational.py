# SPDX-License-Identifier: Apache-2.0
"""Statistics of variational draws that measure how close the fit is to the posterior."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np
import xarray as xr

import jax
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.fitting.single_effects import Effects, sets_of
from numpyro_spikeslab.reporting.arviz_data import PROBABILITIES, SETS, posterior, sample_dims
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision


@full_precision
def add_variational_stats(
    data: xr.DataTree,
    svi: Any,
    svi_result: Any,
    model_args: tuple = (),
    model_kwargs: dict[str, Any] | None = None,
) -> xr.DataTree:
    """Add the statistics to variational draws that :func:`compare` and :func:`summary` need.

    They are the ``sample_stats`` group of the result:

    - ``log_ratio``: ``log p(y, z) - log q(z)`` of every draw ``z``;
    - ``inclusion_probabilities.w``: for the guides of this package, the exact inclusion
      probabilities of each set of weights, the same for all draws;
    - ``credible_sets.w``: for a :class:`~numpyro_spikeslab.PairedGuide` that
      :class:`~numpyro_spikeslab.CAVI` has fitted to the columns of one design, the probability of
      each member of each set of :meth:`~numpyro_spikeslab.PairedGuide.credible_sets`, NaN for other
      columns; dimension ``set``, then the plates;
    - the attribute ``bound``: the evidence lower bound, exact for
      :class:`~numpyro_spikeslab.CAVI`, else the mean of ``log_ratio``.

    :param data: the result of ``arviz_base.from_numpyro_svi`` for the same fit.
    :param svi: the :class:`~numpyro.infer.SVI` or :class:`~numpyro_spikeslab.CAVI` of the fit.
    :param svi_result: the result of its ``run``.
    :param model_args: arguments of the model, as for the fit.
    :param model_kwargs: keyword arguments of the model, besides those of ``svi``.
    :returns: ArviZ data with the same posterior.
    :raises ValueError: if ``data`` are not variational draws of all latent sites of the guide, or
        have no density under it, as draws of another fit.

    .. code-block:: python

        fit = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=(X, y))
        fit = nss.add_variational_stats(fit, svi, result, (X, y))
        nss.compare({"chains": chains, "fit": fit}, "w", reference="chains")
    """
    draws = posterior(data)
    if sample_dims(draws) != ["sample"]:
        remedy = "Make them with arviz_base.from_numpyro_svi."
        raise bad("data", "Markov chains", "variational draws", remedy)
    kwargs = {**(model_kwargs or {}), **svi.static_kwargs}
    latents = latent_draws(draws, svi.guide, svi_result.params, model_args, kwargs)
    densities = jax.jit(lambda x: log_densities(svi, svi_result.params, x, model_args, kwargs))
    log_p, log_q = map(np.asarray, densities(latents))
    if impossible := np.sum(log_q == -np.inf):
        got = f"{impossible} of {log_q.size} draws without density under the guide of `svi_result`"
        remedy = "Pass the `svi_result` that they were made with."
        raise bad("data", got, "draws of this fit", remedy)
    guide, bound, effects, probs = svi.guide, (log_p - log_q).mean(), None, {}
    if hasattr(guide, "inclusion_probabilities"):
        probs = guide.inclusion_probabilities(svi_result.params)
    # CAVI evaluates the bound itself, SVI a random estimate, of more models
    if type(svi).evaluate is not SVI.evaluate:
        bound = -svi.evaluate(svi_result.state, *model_args, **kwargs)
        if isinstance(guide, PairedGuide):
            effects = guide.effects(svi_result.params, *model_args, **kwargs)
    stats = FitStatistics(log_p, log_q, probs, effects).of_draws(draws, bound)
    return xr.DataTree.from_dict({**data.to_dict(), "/sample_stats": stats})


class FitStatistics(NamedTuple):
    """Log densities of draws of a fit under model and guide, inclusion probabilities by site, and
    what credible sets need, `None` without sets."""

    log_p: Float[Array | np.ndarray, " S"]
    log_q: Float[Array | np.ndarray, " S"]
    probs: dict[str, Any]
    effects: Effects | None

    def of_draws(self, draws: xr.Dataset, bound: Any) -> xr.Dataset:
        """Make the group of ArviZ that belongs to the draws."""
        ratios = {"log_ratio": ("sample", self.log_p - self.log_q)}
        stats = xr.Dataset(ratios, {"sample": draws["sample"]}, {"bound": float(bound)})
        for name, probs in self.probs.items():
            like = np.full(draws[name].shape, probs, draws[name].dtype)
            stats[f"{PROBABILITIES}.{name}"] = draws[name].copy(data=like)
        if self.effects is not None:
            places = np.cumsum([0, *(draws[name][0].size for name in self.probs)])
            sets = list(sets_of(self.effects, range(places[-1])))
            shares = np.full((len(sets), places[-1]), np.nan)
            for row, each in zip(shares, sets, strict=True):
                row[each.members] = each.shares
            for name, part in zip(self.probs, np.split(shares, places[1:-1], axis=1), strict=True):
                _, *plates = draws[name].dims
                shape = len(sets), *(draws.sizes[plate] for plate in plates)
                stats[f"{SETS}.{name}"] = ("set", *plates), part.reshape(shape)
        return stats


def log_densities(
    svi: Any, params: dict[str, Any], latents: dict[str, Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Compute the log densities of draws under the model and under the guide."""

    def of(latents):
        log_p = log_density(svi.model, args, kwargs, params | latents)[0]
        return log_p, log_density(svi.guide, args, kwargs, params | latents)[0]

    # batches bound the memory
    return jax.lax.map(of, latents, batch_size=100)


def latent_draws(
    draws: xr.Dataset, guide: Any, params: dict[str, Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the draws of the latent and auxiliary sites of the guide."""
    fitted = handlers.substitute(handlers.seed(guide, 0), data=params)
    trace = handlers.trace(fitted).get_trace(*args, **kwargs)
    sites = {name: site for name, site in trace.items() if site["type"] == "sample"}
    auxiliary = [name for name, site in sites.items() if site["infer"].get("is_auxiliary")]
    missing = [name for name in sites if name not in draws and name not in auxiliary]
    if missing or (auxiliary and not hasattr(guide, "auxiliary_values")):
        got = f"a posterior that lacks {missing or auxiliary}, which the guide samples"
        remedy = "Collect them, and use a guide without auxiliary sites."
        raise bad("data", got, "all latent sites", remedy)
    values = {
        name: jnp.asarray(draws[name].values, site["value"].dtype)
        for name, site in sites.items()
        if name in draws
    }
    return values | (guide.auxiliary_values(values) if auxiliary else {})
