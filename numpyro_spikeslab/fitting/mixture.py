# SPDX-License-Identifier: Apache-2.0
"""Several optima as one posterior: a mixture of them as a guide."""

from collections.abc import Callable
from typing import Any
import warnings

from jaxtyping import Int
import numpy as np

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_spikeslab.fitting.components import (
    Mixture,
    distinct,
    flatten,
    quantiles_of,
    unflatten,
)
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.guide_factors import declared
from numpyro_spikeslab.fitting.inner import makes_delta
from numpyro_spikeslab.fitting.run import Optima
from numpyro_spikeslab.fitting.summaries import is_called, levels_of
from numpyro_spikeslab.precision import full_precision

MOST_LOST = 0.05
"""Weight of the optima that are left out, above which the user is told."""


MOST_ROUNDED = 0.5
"""Nats that the rounding of bounds may make, above which the user is told."""


def warn_of_rounding(optima: Optima, every: Int[np.ndarray, " K"]) -> None:
    """Weights are differences of bounds, of which little may be left in single precision."""
    precision = jnp.result_type(*optima.params.values())
    largest = float(np.max(np.abs(optima.bounds[every])))
    rounding = float(jnp.finfo(precision).eps) * largest
    if len(every) > 1 and rounding > MOST_ROUNDED:
        warnings.warn(
            f"MixtureGuide.combine: in {precision} bounds of {largest:.1g} nats are known to "
            f"{rounding:.1g} nats only, and the weights of the optima no better. Call "
            "numpyro.enable_x64() before the fit.",
            stacklevel=4,
        )


class MixtureGuide(AutoGuide):
    """The mixture of several optima of :class:`~numpyro_spikeslab.CAVI`, weighted by their bounds.

    Of correlated columns a fit settles on one, and its restarts on others. Where their bounds are
    within a few nats, no single one is the posterior. This guide has the optima ``q_k`` of bounds
    ``F_k`` as components of ``q = sum_k pi_k q_k`` with ``pi_k`` proportional to ``exp(F_k)``.
    These weights are the best where components do not overlap, and the bound of the mixture is
    then ``logsumexp_k F_k``. Where they overlap it is lower, and those that overlap weigh too much.

    A component is a point in all sites but the weights, as with
    :class:`~numpyro.infer.autoguide.AutoDelta`, or, where a site follows them, a point given the
    weights. So optima with other values there never overlap,
    and their weights compare joint densities at points: they presume that the posterior of these
    sites is about as wide around each.

    It is an :class:`~numpyro.infer.autoguide.AutoGuide`, whose density is that of the mixture: in
    NumPyro's ``Predictive`` and :class:`~numpyro.infer.TraceGraph_ELBO`, and in ArviZ's
    ``from_numpyro_svi`` with ``SVI(model, mixture, ...)`` and the parameters of :meth:`combine`.
    Each of these has a leading axis of K components, and ``{prefix}_component_probs``, shape (K,),
    has their weights. Without them it starts at ``num_components`` copies of the component's start.

    :param guide: the guide that was fitted, or a fresh one of the same model and blocks. Its inner
        guide must be an ``AutoDelta``, and the model without latent functions and without params.
    :param num_components: at most so many optima are kept. The default is 5.
    :raises TypeError: if the guide is of another class.
    :raises ValueError: if it has another inner guide, or ``num_components`` is less than 1; when
        first called, if the model has latent functions or params.

    **Example**

    Of two columns that are the same, each carries the effect with probability one half:

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (30, 3))
        >>> X = X.at[:, 2].set(X[:, 0])
        >>> guide = nss.PairedGuide(model)
        >>> svi = nss.CAVI(model, guide, num_restarts=20)
        >>> result = svi.run(jax.random.key(1), 120, X, X[:, 0] / 2, progress_bar=False)
        >>> sorted(guide.inclusion_probabilities(result.params)["w"].round(1).tolist())
        [0.0, 0.0, 1.0]
        >>> mixture = nss.MixtureGuide(guide)
        >>> params = mixture.combine(result.optima, X, X[:, 0] / 2)
        >>> mixture.inclusion_probabilities(params)["w"].round(1).tolist()
        [0.5, 0.0, 0.5]
    """

    def __init__(self, guide: Any, *, num_components: int = 5) -> None:
        if not isinstance(guide, SpikeSlabGuide):
            raise TypeError(
                "MixtureGuide: guide must be a PairedGuide or a MeanFieldGuide, got "
                f"{type(guide).__name__}. Give it the guide that CAVI has fitted."
            )
        if not makes_delta(guide.inner_guide):
            raise ValueError(
                "MixtureGuide: the guide's inner guide must be AutoDelta, got "
                f"{getattr(guide.inner_guide, '__name__', guide.inner_guide)}. Fit a guide without "
                "`inner_guide` with CAVI."
            )
        if type(num_components) is not int or num_components < 1:
            raise ValueError(
                f"MixtureGuide: num_components is {num_components!r}, expected an integer of 1 or "
                "more."
            )
        super().__init__(guide.model, prefix=guide.prefix)
        self.guide, self.num_components = guide, num_components
        self._probs_name = f"{self.prefix}_component_probs"
        self._auxiliary_name = f"_{self.prefix}_latent"

    @full_precision
    def combine(self, optima: Optima | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameters of the mixture of optima.

        Two optima are the same if no inclusion probability of theirs differs by more than 0.1; of
        those that are the same the best is kept, and ``num_components`` of all, the best first.

        Warns where optima that are left out have weight, and where the rounding of the bounds, in
        single precision, makes the weights.

        :param optima: as from ``result.optima`` of a run with ``num_restarts``.
        :param args: arguments of the model, as for the fit.
        :param kwargs: keyword arguments of the model.
        :return: ``{name: array of shape (K, ...)}``.
        :raises TypeError: if ``optima`` is something else.
        :raises ValueError: if there are no optima, or they have other parameters or blocks than
            the guide.
        """
        if not isinstance(optima, Optima | None):
            raise TypeError(
                f"MixtureGuide.combine: optima is of type {type(optima).__name__}, expected "
                "Optima. Give `result.optima`, then the arguments of the model."
            )
        if optima is None:
            raise ValueError(
                "MixtureGuide.combine: optima are missing. A run has them with several starts, as "
                "of `CAVI(model, guide, num_restarts=20)`, unless it was interrupted, is part of a "
                "transformation or has latent functions."
            )
        self._set_up(args, kwargs)
        found = {name: jnp.shape(x)[1:] for name, x in optima.params.items()}
        expected = {name: jnp.shape(x) for name, (x, _) in self.guide.start().items()}
        if found != expected:
            raise ValueError(
                f"MixtureGuide.combine: optima has parameters of the shapes {found}, expected "
                f"{expected}. Combine those of a fit with the guide of this mixture, to the same "
                "data."
            )
        if optima.blocks != self.guide.blocks:
            raise ValueError(
                f"MixtureGuide.combine: optima is of a guide with the blocks {optima.blocks}, "
                f"expected {self.guide.blocks}. Make the mixture of the guide that was fitted, or "
                "of `PairedGuide(model, blocks=fitted.blocks)`."
            )
        every = distinct(self.guide, optima)
        kept = every[: self.num_components]
        warn_of_rounding(optima, every)
        weights = jax.nn.softmax(jnp.asarray(optima.bounds[every]))
        lost = float(jnp.sum(weights[self.num_components :]))
        if lost > MOST_LOST:
            warnings.warn(
                f"MixtureGuide.combine: {len(every) - len(kept)} optima of {len(every)} are left "
                f"out, which have {lost:.2f} of the weight. Make the mixture with num_components="
                f"{len(every)}.",
                stacklevel=3,
            )
        params: dict[str, Any] = {name: jnp.asarray(x)[kept] for name, x in optima.params.items()}
        return params | {self._probs_name: jax.nn.softmax(jnp.asarray(optima.bounds[kept]))}

    # As a guide

    def _set_up(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.guide.set_up(args, kwargs)
        if self.guide.functions:
            raise ValueError(
                f"MixtureGuide: the model has the latent functions {list(self.guide.functions)}, "
                "expected none. Use the guide of the best start."
            )
        if self.guide._params:
            raise ValueError(
                f"MixtureGuide: the model has the params {list(self.guide._params)}, expected "
                "none: their values would differ from component to component. Make them sample "
                "sites, with a prior."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._set_up(args, kwargs)
        K = self.num_components
        start = {
            name: (jnp.broadcast_to(x, (K, *jnp.shape(x))), constraint)
            for name, (x, constraint) in self.guide.start().items()
        }
        start[self._probs_name] = jnp.full(K, 1 / K), constraints.simplex
        # of given parameters there may be fewer components
        params = dict(zip(start, declared(start, leading=1), strict=True))
        probs, components = self._split(params)
        mixture = Mixture(probs, components, self.guide, args, kwargs)
        flat = numpyro.sample(self._auxiliary_name, mixture, infer={"is_auxiliary": True})
        event_dims = {} if self.guide.inner is None else self.guide.inner._event_dims
        return {
            name: numpyro.sample(name, dist.Delta(x, event_dim=event_dims.get(name, 0)))
            for name, x in unflatten(self.guide, flat).items()
        }

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Value of the guide's auxiliary site that gives these ``draws``, once it was called."""
        return {self._auxiliary_name: flatten(self.guide, draws)}

    # Summaries

    def _split(self, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The weights of the components, and their parameters."""
        if self._probs_name not in params:
            raise ValueError(
                f"MixtureGuide: params has no {self._probs_name!r}, got {sorted(params)}. Give the "
                "parameters of a mixture, from `mixture.combine(result.optima, ...)`."
            )
        components = {name: x for name, x in params.items() if name != self._probs_name}
        return params[self._probs_name], components

    def _average(self, summary: Callable, params: dict[str, Any]) -> dict[str, Any]:
        probs, components = self._split(params)
        return jax.tree.map(lambda x: jnp.tensordot(probs, x, 1), jax.vmap(summary)(components))

    @full_precision
    def inclusion_probabilities(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior inclusion probability of each weight, ``sum_k pi_k gamma_k``.

        :param params: parameters, as from :meth:`combine`.
        :return: ``{name: array in the shape of the weights}``.
        """
        return self._average(self.guide.inclusion_probabilities, params)

    @full_precision
    def posterior_mean(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Posterior mean of each weight, ``sum_k pi_k gamma_k mu_k``.

        :param params: parameters, as from :meth:`combine`; the model's arguments are not needed.
        :return: ``{name: array in the shape of the weights}``.
        """
        return self._average(self.guide.posterior_mean, params)

    @full_precision
    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draws, each from one component: of all latent sites and the model's deterministic ones.

        :param rng_key: random key.
        :param params: parameters, as from :meth:`combine`.
        :param args: arguments of the model, as for the fit.
        :param sample_shape: leading shape of the draws.
        :param kwargs: keyword arguments of the model.
        :return: ``{site: array of shape (*sample_shape, ...)}``.
        """
        self._split(params)
        return self.guide.sample_from(self, rng_key, params, args, kwargs, sample_shape)

    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Posterior medians: :meth:`quantiles` at one half, of the same arguments and errors."""
        return self.quantiles(params, 0.5, *args, **kwargs)

    @full_precision
    def quantiles(
        self, params: dict[str, Any], quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Posterior quantiles of each weight, each spike and each other latent site.

        A weight's distribution has an atom at zero, so its quantiles may be exactly 0. The entry
        of a slab is given that the weight is included; those of other sites are components' values.

        :param params: parameters, as from :meth:`combine`.
        :param quantiles: Q probabilities, or one.
        :param args: arguments of the model; not needed but for spikes of groups.
        :param kwargs: keyword arguments of the model, likewise.
        :return: ``{site: array of shape (Q, ...)}``; without the leading axis for one probability.
        """
        levels = levels_of(quantiles, "MixtureGuide")
        called = is_called(self.model, args, kwargs)
        if called:
            self._set_up(args, kwargs)
        probs, components = self._split(params)
        pairs = self.guide.pairs_of(components, called)
        found = quantiles_of(self.guide, pairs, probs, components, levels.reshape(-1))
        return found if levels.ndim else {name: x[0] for name, x in found.items()}
