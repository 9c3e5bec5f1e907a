# SPDX-License-Identifier: Apache-2.0
"""What the guides say of the posterior: probabilities, means, draws, quantiles."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from math import prod
from typing import Any

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_spikeslab.algebra.quantiles import quantiles
from numpyro_spikeslab.distributions import SpikeSlab
from numpyro_spikeslab.fitting.guide_factors import Marginals, PairFactors, in_order, moments
from numpyro_spikeslab.fitting.inner import inner_summary, makes_delta
from numpyro_spikeslab.fitting.pattern_factors import PatternFactors
from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.form import Pair, observed_sites
from numpyro_spikeslab.reading.model_run import abstract_trace
from numpyro_spikeslab.reading.program import compiled


class PosteriorSummaries(AutoGuide):
    """Summaries of a posterior, from parameters and the model's arguments alone.

    - **pairs**, **functions** - of the model that the guide has last been called with.
    - **factors** - what is told of the pairs.
    - **inner_guide**, **inner** - of the other sites: its class, and once set up itself.
    """

    pairs: tuple[Pair, ...]
    functions: tuple[str, ...]
    factors: PairFactors | PatternFactors | Any
    inner_guide: Callable[..., AutoGuide]
    inner: AutoGuide | None

    @abstractmethod
    def set_up(self, args: tuple, kwargs: dict[str, Any], key: Any = None) -> None:
        """Note sites and start values, anew where the sites are others."""

    @property
    def blocks(self) -> dict[str, list[list[int]]] | None:
        """The blocks of each site, once the guide has been called; `None` without blocks."""
        return self.factors.blocks

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the guide's auxiliary sites that give these ``draws``, once it was called."""
        return self.factors.auxiliary_values(self.pairs, draws)

    def inclusion_probabilities(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior inclusion probability ``gamma`` of each weight.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :return: ``{name: array in the shape of the weights}``.
        """
        return {
            name: moments(self.factors.marginals(pair, params), pair.shape)[0]
            for name, pair in self._pairs_in(params).items()
        }

    def _pairs_in(self, params: dict[str, Any]) -> dict[str, Pair]:
        if isinstance(self.factors, PatternFactors):
            return {pair.name: pair for pair in self.pairs}
        end = self.factors.names("")[0]
        shapes = {k.removesuffix(end): jnp.shape(x) for k, x in params.items() if k.endswith(end)}
        return {name: Pair(name, shape) for name, shape in shapes.items()}

    @full_precision
    def posterior_mean(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Posterior mean ``<w> = gamma mu`` of each weight; with the model's arguments, also that
        of its latent functions.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :param args: arguments of the model; without them latent functions are left out.
        :param kwargs: keyword arguments of the model.
        :return: ``{name: array in the shape of the site}``.
        """
        means = {name: marginal.mean for name, marginal in self._marginals(params).items()}
        called = is_called(self.model, args, kwargs)
        functions = self._function_moments(params, args, kwargs) if called else {}
        return means | {name: mean for name, (mean, _) in functions.items()}

    def _marginals(self, params: dict[str, Any]) -> dict[str, SpikeSlab]:
        marginals = {}
        for name, pair in self._pairs_in(params).items():
            probs, loc, scale = moments(self.factors.marginals(pair, params), pair.shape)
            marginals[name] = SpikeSlab(probs, scale, loc)
        return marginals

    def _function_moments(
        self, params: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        """Means and variances of the latent functions at the inputs."""
        return {}

    @full_precision
    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draw from the guide: all latent sites and the model's deterministic sites, without those
        on which no observation depends, such as responses to new inputs.

        :param rng_key: random key.
        :param params: parameters of the guide.
        :param args: arguments of the model, as for the fit.
        :param sample_shape: leading shape of the draws.
        :param kwargs: keyword arguments of the model.
        """
        try:
            self.set_up(args, kwargs)
        except TypeError as error:
            if not args and not kwargs:
                error.add_note("Give the model's arguments: `sample_posterior(key, params, X, y)`.")
            raise
        sites = [name for pair in self.pairs for name in (pair.spike, pair.slab)]
        sites += self.functions

        def draw(params):
            key_guide, key_model = random.split(rng_key)
            draws = Predictive(
                self,
                params=params,
                num_samples=prod(sample_shape),
                return_sites=[*self._others, *sites],
                parallel=True,
            )(key_guide, *args, **kwargs)
            for p in self.pairs:
                draws[p.name] = weights(p.of_weights(draws[p.spike]), draws[p.slab])
            missing = [name for name in self._deterministics if name not in draws]
            if missing:
                predictive = Predictive(self.model, draws, params=params, return_sites=missing)
                draws |= predictive(key_model, *args, **kwargs)
            return {name: x.reshape(sample_shape + x.shape[1:]) for name, x in draws.items()}

        # in one piece, for operation by operation takes several times as long to compile
        return compiled(draw, params)

    @full_precision
    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Posterior median of each weight, each spike and each other latent site.

        The entry of a slab is its median given that the weight is included, that of a site which
        follows the weights its value at their mean.

        :param params: parameters of the guide.
        :param args: arguments of the model; without them latent functions, and spikes of groups,
            are left out.
        :param kwargs: keyword arguments of the model.
        """
        self._make_ready(args, kwargs)
        medians = self._inner_median(params)
        found = self._own_quantiles(params, np.array([0.5]), args, kwargs)
        return medians | {name: x[0] for name, x in found.items()}

    def _make_ready(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Set up an inner guide whose parameters are not the values of its sites."""
        if makes_delta(self.inner_guide):
            return
        if is_called(self.model, args, kwargs):
            self.set_up(args, kwargs)
        elif self.prototype_trace is None:
            raise ValueError(
                f"{type(self).__name__}: a guide that has not been called needs the model's "
                "arguments to read the parameters of its inner guide. Give them, as for the fit."
            )

    def _inner_median(self, params: dict[str, Any]) -> dict[str, Any]:
        if not makes_delta(self.inner_guide):
            return {} if self.inner is None else inner_summary(self.inner, "median", params)
        # the guide may have been called for other sites, or not at all
        end = f"_{self.prefix}_loc"
        own = {f"{name}{end}" for name in self._pairs_in(params)}
        return {
            k.removesuffix(end): x for k, x in params.items() if k.endswith(end) and k not in own
        }

    @full_precision
    def quantiles(
        self, params: dict[str, Any], quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Posterior quantiles of each weight, each spike and each other latent site.

        A weight's distribution has an atom at zero, so its quantiles may be exactly 0. The entry
        of a slab holds its quantiles given that the weight is included. A site which follows the
        weights has its value at their mean for all of its quantiles; draws have its spread.

        :param params: parameters of the guide.
        :param quantiles: Q probabilities, or one.
        :param args: arguments of the model; without them latent functions, and spikes of groups,
            are left out.
        :param kwargs: keyword arguments of the model.
        :return: ``{site: array of shape (Q, ...)}``; without the leading axis for one probability.
        """
        levels = levels_of(quantiles, type(self).__name__)
        self._make_ready(args, kwargs)
        every = levels.reshape(-1)
        if self.inner is None or isinstance(self.inner, AutoDelta):
            medians = self._inner_median(params)
            found = jax.tree.map(lambda x: jnp.broadcast_to(x, every.shape + jnp.shape(x)), medians)
        else:
            found = inner_summary(self.inner, "quantiles", params, every)
        found |= self._own_quantiles(params, every, args, kwargs)
        return found if levels.ndim else {name: x[0] for name, x in found.items()}

    def _own_quantiles(self, params, levels, args, kwargs) -> dict[str, Any]:
        """Quantiles of weights, spikes, slabs and latent functions."""
        found: dict[str, Any] = {}
        called = is_called(self.model, args, kwargs)
        if called:
            self.set_up(args, kwargs)
        for pair in self.pairs_of(params, called):
            found |= self.quantiles_of_pair(pair, self.factors.marginals(pair, params), levels)
        functions = self._function_moments(params, args, kwargs) if called else {}
        for name, (mean, variance) in functions.items():
            q = jnp.reshape(jnp.asarray(levels, mean.dtype), (-1, 1, 1))
            found[name] = dist.Normal(mean, jnp.sqrt(variance)).icdf(q)
        return found

    def pairs_of(self, params: dict[str, Any], called: bool) -> list[Pair]:
        """The weights of these parameters, and their pairs.

        :param called: whether the guide has been set up for the model's arguments, without which
            the pairs are not known.
        :raises ValueError: if the model has other weights.
        """
        pairs = self._pairs_in(params)
        if not called:
            return list(pairs.values())
        own = [pair.name for pair in self.pairs]
        if set(own) != pairs.keys():
            raise ValueError(
                f"{type(self).__name__}: params: got parameters of the weights {list(pairs)}, "
                f"expected of {own}, which the model has with these arguments. Give those of the "
                "fit."
            )
        return list(self.pairs)

    def quantiles_of_pair(self, pair: Pair, marginals: Marginals, levels: Any) -> dict[str, Any]:
        """Quantiles of weights, slabs and spikes with these marginals."""
        q = jnp.asarray(levels, marginals[0][1].mean.dtype)
        each = [(*quantiles(part, q), q[:, None] > 1 - part.probs) for _, part in marginals]
        weight, slab, spike = (in_order(marginals, x, pair.shape) for x in zip(*each, strict=True))
        spike = pair.of_spikes(spike.astype(int))
        return {pair.name: weight, pair.slab: slab, pair.spike: spike}


def is_called(model: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether these are arguments for the model, which may hold its data and take none."""
    if args or kwargs:
        return True
    left, many = signature(model).parameters, (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    if not left:
        return True
    needed = (x.default is Parameter.empty and x.kind not in many for x in left.values())
    if not isinstance(model, partial) or any(needed):
        return False
    try:
        trace = abstract_trace(model, args, kwargs)
    except Exception:
        # such as a model that takes its sizes from the observations
        return False
    # without observations it holds inputs alone; a factor may be one of anything
    return any(type(trace[name]["fn"]) is not dist.Unit for name in observed_sites(trace))


def levels_of(quantiles: Any, user: str) -> np.ndarray:
    """The probabilities of quantiles, one or several.

    :raises ValueError: if they are something else.
    """
    levels = np.asarray(quantiles, float)
    if levels.ndim > 1 or not np.all((levels >= 0) & (levels <= 1)):
        raise ValueError(
            f"{user}.quantiles: expected probabilities between 0 and 1, one or a list, got "
            f"{quantiles!r}."
        )
    return levels
