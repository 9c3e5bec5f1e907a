# SPDX-License-Identifier: Apache-2.0
"""The paired mean field as a guide."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints

from numpyro_spikeslab.algebra.alike import COVERAGE, MIN_CORRELATION, check_limits
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.groups import GroupedMeanField
from numpyro_spikeslab.fitting.function_guide import FunctionGuide
from numpyro_spikeslab.fitting.groups import (
    pack_groups,
    sample_groups,
    start_groups,
    unpack_groups,
)
from numpyro_spikeslab.fitting.sets import (
    Effects,
    check_params,
    columns_of,
    effects_of,
    labels_of,
    sets_of,
    shares_of,
    table_of,
)
from numpyro_spikeslab.reading.evaluate import abstract_trace
from numpyro_spikeslab.reading.form import COLUMNS, Form, Pair, is_latent
from numpyro_spikeslab.reading.reader import Reading

PARTS = PairedMeanField._fields


class PairedGuide(FunctionGuide):
    """Paired mean field: each slab and its spike share a factor (paper, eq. 5).

    An :class:`~numpyro.infer.autoguide.AutoGuide`. The weights of ``spike_slab("w", ...)`` get the
    parameters, each in the shape of the weights,

    - ``w_{prefix}_probs``, the inclusion probability ``gamma``;
    - ``w_{prefix}_loc``, mean ``mu`` of the slab given inclusion;
    - ``w_{prefix}_scale``, its standard deviation given inclusion.

    Given exclusion the slab has its prior, as in the true posterior. Weights that share a spike
    (``groups`` of :func:`~numpyro_spikeslab.spike_slab`) have one joint factor for each group:
    ``probs`` has the same value for all members, and in place of the scale there is
    ``w_{prefix}_scale_tril``, shape (P, K), for each weight its row of the Cholesky factor of its
    group's covariance, filled up with zeros; K is the size of the largest group, rounded up to a
    power of two. The functions of
    ``latent_functions("phi", ...)`` are Gaussian, independent of each other: their prior times
    ``exp(linear * phi - precision * phi**2 / 2)`` at each input, with the parameters
    ``phi_{prefix}_precision`` and ``phi_{prefix}_linear``, each of shape (M, N). The optimum is of
    this form, and neither parameter needs the inverse of a covariance; :meth:`posterior_mean` has
    the means. All other latent sites get an inner autoguide.
    :class:`~numpyro_spikeslab.CAVI` fits it in closed form; it works as it is in
    :class:`~numpyro.infer.SVI` with :class:`~numpyro.infer.TraceGraph_ELBO` too.

    A guide keeps no data: what it says follows from parameters and the model's arguments alone.

    :param model: a model with at least one :func:`~numpyro_spikeslab.spike_slab`.
    :param prefix: part of the parameters' names.
    :param inner_guide: called with the model of the other latent sites and ``prefix=``. The
        default, :class:`~numpyro.infer.autoguide.AutoDelta`, is what CAVI needs; with another,
        such as :class:`~numpyro.infer.autoguide.AutoNormal`, use SVI.
    :raises ValueError: when first called, if the model has no pairs, a broken pair, or other
        discrete latent sites.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, 0.1), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (30, 3))
        >>> guide = nss.PairedGuide(model)
        >>> svi = nss.CAVI(model, guide)
        >>> result = svi.run(jax.random.key(1), 120, X, X[:, 0], progress_bar=False)
        >>> guide.inclusion_probabilities(result.params)["w"].round(1).tolist()
        [1.0, 0.0, 0.0]
    """

    @property
    def _key(self) -> str:
        """Name of a parameter, with braces for those of the weights and of the part."""
        return f"{{}}_{self.prefix}_{{}}"

    def _names(self, name: str) -> list[str]:
        return [self._key.format(name, part) for part in PARTS]

    def _pair_names(self, params: dict[str, Any]) -> list[str]:
        end = f"_{self.prefix}_probs"
        return [name.removesuffix(end) for name in params if name.endswith(end)]

    def _start_pair(self, pair: Pair) -> dict[str, tuple[Any, Any]]:
        scale = self._slab_scales[pair.name]
        if pair.groups is not None:
            return start_groups(pair, self._key.format(pair.name, "{}"), scale)
        probs_name, loc_name, scale_name = self._names(pair.name)
        return {
            probs_name: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc_name: (jnp.zeros_like(scale), constraints.real),
            scale_name: (scale, constraints.softplus_positive),
        }

    def _sample_pair(self, pair: Pair, prior_scale: Any, within: Callable) -> dict[str, Any]:
        def params() -> Any:
            return tuple(
                numpyro.param(name, value, constraint=constraint)
                for name, (value, constraint) in self._start_pair(pair).items()
            )

        if pair.groups is not None:
            # their rows are of no plate
            return sample_groups(pair, params(), prior_scale, self._joint_name(pair), within)
        with within(pair.slab):
            probs, loc, scale = params()
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(
                pair.slab, dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            )
        return {pair.spike: spike, pair.slab: slab}

    def _joint_name(self, pair: Pair) -> str:
        return f"_{pair.slab}_{self.prefix}_latent"

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the guide's auxiliary sites that give the slabs of ``draws``."""
        grouped = (pair for pair in self.pairs if pair.groups is not None)
        return {self._joint_name(pair): draws[pair.slab] for pair in grouped}

    def _marginal(self, name: str, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        probs, loc, scale = (params.get(key) for key in self._names(name))
        if scale is None:
            scale = jnp.linalg.norm(params[self._key.format(name, "scale_tril")], axis=1)
        return probs, loc, scale

    def pack_weights(
        self, form: Form, params: dict[str, Any]
    ) -> PairedMeanField | GroupedMeanField:
        if form.groups is not None:
            return pack_groups(form, params, self._key)
        joined = (form.join(params, f"{{}}_{self.prefix}_{part}") for part in PARTS)
        shape = (-1,) if form.kind == COLUMNS else form.shape
        return PairedMeanField(*(x.reshape(shape) for x in joined))

    def unpack_weights(
        self, form: Form, factors: PairedMeanField | GroupedMeanField
    ) -> dict[str, Any]:
        if isinstance(factors, GroupedMeanField):
            return unpack_groups(form, factors, self._key)
        params: dict[str, Any] = {}
        for part, values in zip(PARTS, factors, strict=True):
            params |= form.split(jnp.ravel(values), f"{{}}_{self.prefix}_{part}")
        return params

    def credible_sets(
        self,
        params: dict[str, Any],
        *args: Any,
        site: str | None = None,
        coverage: float = COVERAGE,
        min_correlation: float = MIN_CORRELATION,
        **kwargs: Any,
    ) -> Any:
        """Sets of columns that could carry an effect of the fit instead of the one that does.

        Of columns that are alike a fit settles on one, and is then sure of it; its draws know of no
        other. This asks, for each column of inclusion probability above 0.5, which columns could
        carry its effect given all other effects as the fit has them: the single-effect regression
        of SuSiE (Wang, Sarkar, Carbonetto and Stephens, 2020). A set is made of the fewest columns
        that have the probability ``coverage``, and of those that are the same but for their units.
        Without correlated members there is no set, and of two effects with the same set there is
        one row, as in SuSiE.

        Weights, noise and scales of other sites are held; coefficients, such as an intercept, are
        integrated out. What only two changes at once would tell is not seen, so chains know more:
        :func:`numpyro_spikeslab.credible_sets` has the sets of their draws.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param site: the weights whose effects are asked for, the default all.
        :param coverage: least probability of a set, in (0, 1].
        :param min_correlation: least absolute correlation of members, in [0, 1]. The default is
            SuSiE's.
        :param kwargs: keyword arguments of the model.
        :return: a DataFrame with one row per set, in the order of the weights: ``effect``, the
            weight on which the fit has settled; ``members``, a tuple, the most probable first;
            ``size``; ``probability`` that the set holds the effect, if there is one; ``purity``,
            the smallest absolute correlation among its members; ``shares``, their probabilities.
            Weights are numbered as they are indexed: 3, ``(0, 3)`` in a matrix, and ``("w", 3)`` in
            a model with several sites, whose columns may stand in for each other.
        :raises ValueError: if the weights do not multiply columns of one design, there is no such
            site, the parameters are not those of the weights, or a number is outside its range.

        **Example**

        .. doctest::

            >>> import jax, numpyro, numpyro.distributions as dist
            >>> import numpyro_spikeslab as nss
            >>> def model(X, y=None):
            ...     with numpyro.plate("feature", X.shape[1]):
            ...         w = nss.spike_slab("w", 0.25)
            ...     with numpyro.plate("obs", X.shape[0]):
            ...         numpyro.sample("y", dist.Normal(X @ w, 0.1), obs=y)
            >>> X = jax.random.normal(jax.random.key(0), (30, 3))
            >>> X = X.at[:, 2].set(2 * X[:, 0])      # no data tell them apart
            >>> guide = nss.PairedGuide(model)
            >>> svi = nss.CAVI(model, guide)
            >>> result = svi.run(jax.random.key(1), 120, X, X[:, 0], progress_bar=False)
            >>> guide.inclusion_probabilities(result.params)["w"].round(1).tolist()
            [1.0, 0.0, 0.0]
            >>> guide.credible_sets(result.params, X, X[:, 0])[["effect", "members"]]
                 effect members
            set
            0         0  (0, 2)
        """
        check_limits(coverage, min_correlation)
        self._check_given("credible_sets", "X, y", args, kwargs)
        reading = self._read(args, kwargs)
        columns = columns_of(reading.form, site)
        effects = self._effects(reading, params)
        sets = sets_of(effects, columns, coverage, min_correlation)
        return table_of(sets, labels_of(reading.form))

    def set_shares(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The ``shares`` of all S credible sets by their defaults, NaN for other columns.

        :return: ``{name: array of shape (S, ...)}``, empty if the weights multiply no columns.
        """
        reading = self._read(args, kwargs)
        if reading.form.kind != COLUMNS or reading.form.groups is not None:
            return {}
        effects = self._effects(reading, params)
        return shares_of(sets_of(effects, columns_of(reading.form, None)), reading.form)

    def _effects(self, reading: Reading, params: dict[str, Any]) -> Effects:
        check_params(reading.form, params, self._names("{}")[0])
        return effects_of(reading, self.pack(reading, params))

    def to_init_params(
        self,
        params: dict[str, Any],
        *args: Any,
        rng_key: Array | None = None,
        num_chains: int | None = None,
        unconstrained: Sequence[str] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Start values of chains from a fit, for ``MCMC.run(..., init_params=...)``.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param rng_key: random key of draws from the guide; without it, chains start at the guide's
            medians.
        :param num_chains: number of chains, the leading axis of the values; `None` for a single
            one.
        :param unconstrained: names of those sites that are left to an HMC block of
            :class:`~numpyro.infer.Gibbs`, which takes unconstrained values.
        :param kwargs: keyword arguments of the model.
        :return: ``{site: value}`` for all latent sites.
        :raises ValueError: if ``unconstrained`` has names that are not latent sites.

        **Example**

        .. doctest::

            >>> import jax, numpyro, numpyro.distributions as dist
            >>> import numpyro_spikeslab as nss
            >>> def model(X, y=None):
            ...     with numpyro.plate("feature", X.shape[1]):
            ...         w = nss.spike_slab("w", 0.25)
            ...     with numpyro.plate("obs", X.shape[0]):
            ...         numpyro.sample("y", dist.Normal(X @ w, 0.1), obs=y)
            >>> X = jax.random.normal(jax.random.key(0), (30, 3))
            >>> guide = nss.PairedGuide(model)
            >>> svi = nss.CAVI(model, guide)
            >>> result = svi.run(jax.random.key(1), 120, X, X[:, 0], progress_bar=False)
            >>> start = guide.to_init_params(
            ...     result.params, X, X[:, 0], rng_key=jax.random.key(2), num_chains=4
            ... )
            >>> start["w_spike"].shape, start["w_slab"].shape
            ((4, 3), (4, 3))
        """
        shape = () if num_chains is None else (num_chains,)
        if rng_key is None:
            found = self.median(params, *args, **kwargs)
            found = {k: jnp.broadcast_to(x, (*shape, *jnp.shape(x))) for k, x in found.items()}
        else:
            found = self.sample_posterior(rng_key, params, *args, sample_shape=shape, **kwargs)
        trace = abstract_trace(self.model, args, kwargs)
        values = {name: found[name] for name in trace if is_latent(trace, name)}
        # a fit may reach the end of the interval, where no chain can start
        for name, value in values.items():
            if trace[name]["fn"].support == constraints.unit_interval:
                values[name] = jnp.clip(value, 1e-6, 1 - 1e-6)
        if unknown := sorted(set(unconstrained) - set(values)):
            raise ValueError(
                f"PairedGuide.to_init_params: `unconstrained` has unknown names {unknown}; the "
                f"latent sites are {sorted(values)}."
            )
        for name in unconstrained:
            values[name] = biject_to(trace[name]["fn"].support).inv(values[name])
        return values
