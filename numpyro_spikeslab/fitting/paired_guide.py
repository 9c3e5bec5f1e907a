# SPDX-License-Identifier: Apache-2.0
"""The paired mean field as a guide."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array

import jax.numpy as jnp

from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.correlation import COVERAGE, MIN_CORRELATION, check_limits
from numpyro_spikeslab.fitting import single_effects
from numpyro_spikeslab.fitting.blocks import partitions_of
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.guide_factors import PairFactors
from numpyro_spikeslab.fitting.model_sites import ModelSites
from numpyro_spikeslab.fitting.pattern_factors import PatternFactors
from numpyro_spikeslab.fitting.points import init_to_prior_mean
from numpyro_spikeslab.fitting.predict import checked_rows, predict, refuse_traced, transform
from numpyro_spikeslab.fitting.single_effects import Effects, effects_of
from numpyro_spikeslab.reading.program import compiled
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision


class PairedGuide(SpikeSlabGuide):
    """Paired mean field: each slab and its spike share a factor (paper, eq. 5).

    An :class:`~numpyro.infer.autoguide.AutoGuide` that :class:`~numpyro_spikeslab.CAVI` fits in
    closed form. It also works in :class:`~numpyro.infer.SVI` with
    :class:`~numpyro.infer.TraceGraph_ELBO`. A guide is made for one program: its first call with
    the model's arguments notes sites and shapes, and a call with others raises.

    The weights of ``spike_slab("w", ...)`` have three parameters, in the shape of the weights:

    - ``w_{prefix}_probs``, the inclusion probability ``gamma``;
    - ``w_{prefix}_loc``, the mean ``mu`` of the slab given inclusion;
    - ``w_{prefix}_scale``, its standard deviation given inclusion.

    Given exclusion the slab has its prior, as in the true posterior.

    **Blocks and groups.** The weights of a block, or of a group that shares a spike (``groups`` of
    :func:`~numpyro_spikeslab.spike_slab`), have one joint factor: a mixture over inclusion patterns
    of Gaussians of the included slabs, their exact conditional given all other weights. A block of
    b weights has ``2^b`` patterns, a group has two. Independent pairs pick one of several
    correlated columns; blocks do not. The S weights outside of blocks and groups have the
    parameters above, of shape (S,). K blocks of b weights, or K groups padded to b, a power of two,
    have

    - ``w_{prefix}_patterns_{b}``, the probability of each pattern: shape (K, 2^b) in the order of
      binary numbers for blocks (none first, the last weight alone second, all last), shape (K, 2)
      for groups;
    - ``w_{prefix}_precision_tril_{b}``, shape (K, b, b), the Cholesky factor ``L`` of a precision,
      and ``w_{prefix}_linear_{b}``, shape (K, b), the vector ``c`` of a linear term ``L c``. The
      slabs that a pattern includes are Gaussian, with precision and linear term restricted to them.

    **Latent functions** of ``latent_functions("phi", ...)`` are Gaussian and independent: their
    prior times ``exp(linear * phi - precision * phi**2 / 2)`` at each input, with the parameters
    ``phi_{prefix}_precision`` and ``phi_{prefix}_linear``, shape (M, N).

    **Other sites** are at points, as in :class:`~numpyro.infer.autoguide.AutoDelta`. Sites with a
    Normal prior, such as an intercept, follow the weights, so columns need not be centred: ``beta``
    is at ``loc + slope @ (w - <w>)``, with ``beta_{prefix}_loc`` and ``beta_{prefix}_slope``, whose
    last axis has all P weights; in the plate of Q tasks, the M weights of its own task. No site
    follows with latent functions, or more than 1,048,576 slopes. Inclusion probabilities with a
    Beta prior of a concentration below 1, such as those of a buffet prior, would be at 0: they have
    a Beta factor, with ``pi_{prefix}_concentration1`` and ``pi_{prefix}_concentration0``.

    :param model: a model with at least one :func:`~numpyro_spikeslab.spike_slab`.
    :param blocks: sets of at most 10 weights, as in ``[[0, 1, 2], [7, 8]]``, numbered flat from 0;
        with several sites a dict, ``{"w": [[0, 1, 2]]}``; none by default. ``"auto"`` joins columns
        of absolute correlation above 0.5 at the first call, up to 8 in a block; the attribute
        ``blocks`` has the result, to be passed with saved parameters. Only for weights that
        multiply columns of one design.
    :param prefix: part of the parameters' names.
    :param init_loc_fn: where the other sites start, such as NumPyro's
        :func:`~numpyro.infer.initialization.init_to_value`; by default at their prior mean.
    :raises ValueError: when called, if the model has no pairs, a broken pair, other discrete latent
        sites, or other sites or shapes than before, or ``blocks`` are not disjoint sets.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, 0.1), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (30, 3))
        >>> X = X.at[:, 2].set(X[:, 0])      # no data tell them apart, and the block knows it
        >>> guide = nss.PairedGuide(model, blocks="auto")
        >>> svi = nss.CAVI(model, guide)
        >>> result = svi.run(jax.random.key(1), 120, X, X[:, 0], progress_bar=False)
        >>> guide.blocks
        {'w': [[0, 2]]}
        >>> (guide.inclusion_probabilities(result.params)["w"] > 0.4).tolist()
        [True, False, True]
    """

    def __init__(
        self,
        model: Callable,
        *,
        blocks: Any = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_prior_mean,
    ) -> None:
        self._blocks = blocks
        super().__init__(model, PairFactors(prefix), init_loc_fn)

    def _check_model(self, sites: ModelSites, trace: dict[str, Any], call: Any) -> None:
        if self._blocks is not None or any(pair.groups is not None for pair in sites.pairs):
            partitions = partitions_of(sites.pairs, self._blocks, self.model, trace, call)
            if any(partition.stacks for partition in partitions.values()):
                self.factors = PatternFactors(self.prefix, partitions)

    @full_precision
    def predict(
        self,
        params: dict[str, Any],
        *args: Any,
        X_new: Any = None,
        entries: tuple[Any, Any] | None = None,
        noise: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Compute mean and variance of each task at new inputs, in closed form.

        Under a non-Normal likelihood these are of its predictor f; for responses there is
        :class:`~numpyro.infer.Predictive`.

        For models with :func:`~numpyro_spikeslab.latent_functions`. Each hyperparameter has one
        value, so intervals are narrower than those of a chain.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param X_new: new inputs, shape (S,) or (S, D) as in the model; by default those of the
            data, the only choice where a kernel is a matrix.
        :param entries: numbers of rows and of columns of entries of the table, each of shape (L,).
            The default is the whole table, or the entries of data that are a sparse array.
        :param noise: whether to add the noise, for predictions of Normal observations.
        :param kwargs: keyword arguments of the model.
        :return: mean and variance, each of shape (S, Q), or (L,) of entries.
        :raises ValueError: if the weights mix no latent functions, arguments are traced, inputs or
            entries do not fit, the location without functions is not known there, or noise is
            asked for where it is not known or has no variance.
        """
        refuse_traced("PairedGuide.predict", (params, args, kwargs, X_new, entries))
        reading = self._read(args, kwargs)
        return predict(reading, self.pack(reading, params), X_new, entries, noise)

    @full_precision
    def transform(
        self, params: dict[str, Any], *args: Any, Y_new: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Compute mean and variance of the functions in new rows, given the factors of the weights.

        For functions without order (kernels "white", as in
        :func:`~numpyro_spikeslab.models.factor_analysis`): the transform of scikit-learn's
        decompositions.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param Y_new: new rows of the same tasks, shape (S, Q); NaN is a missing entry.
        :param kwargs: keyword arguments of the model.
        :return: mean and variance, each of shape (M, S).
        :raises ValueError: if the functions have an order, arguments are traced, rows do not fit,
            or noise and location change from row to row.

        **Example**

        .. doctest::

            >>> import jax, numpyro_spikeslab as nss
            >>> factor, noise = jax.random.normal(jax.random.key(0), (2, 60, 5))
            >>> Y = factor[:, :1] + 0.3 * noise
            >>> model = nss.models.factor_analysis(2)
            >>> guide = nss.PairedGuide(model)
            >>> svi = nss.CAVI(model, guide, plain=True)
            >>> result = svi.run(jax.random.key(1), 100, Y[:50], progress_bar=False)
            >>> mean, variance = guide.transform(result.params, Y[:50], Y_new=Y[50:])
            >>> mean.shape
            (2, 10)
        """
        refuse_traced("PairedGuide.transform", (params, args, kwargs, Y_new))
        reading = self._read(args, kwargs)
        return transform(reading, checked_rows(reading, Y_new), self.pack(reading, params))

    @full_precision
    def credible_sets(
        self,
        params: dict[str, Any],
        *args: Any,
        site: str | None = None,
        coverage: float = COVERAGE,
        min_correlation: float = MIN_CORRELATION,
        **kwargs: Any,
    ) -> Any:
        """Find sets of columns that could carry an effect of the fit instead of the one that does.

        CAVI picks one of several correlated columns. For each column of inclusion probability above
        0.5 this gives the columns that could carry its effect, given all other effects, with
        coefficients integrated out: the single-effect regression of SuSiE (Wang, Sarkar, Carbonetto
        and Stephens, 2020). A set has the fewest columns of probability ``coverage``, and copies of
        these in other units. An effect without correlated members makes no set, and two effects
        with the same set make one row.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param site: the weights whose effects are asked for, the default all.
        :param coverage: least probability of a set, in (0, 1].
        :param min_correlation: least absolute correlation of members, in [0, 1]; SuSiE's 0.5.
        :param kwargs: keyword arguments of the model.
        :return: a DataFrame with one row per set: ``effect``, the weight that the fit includes;
            ``members``, a tuple, the most probable first; ``size``; ``probability`` that the set
            holds the effect, if there is one; ``purity``, the smallest absolute correlation among
            its members; ``shares``, their probabilities. Weights are numbered as they are indexed:
            3, ``(0, 3)`` in a matrix, and ``("w", 3)`` in a model with several sites.
        :raises ValueError: if the guide has blocks, the weights share spikes or do not multiply
            columns of one design, or parameters, ``site`` or a number do not fit.

        **Example**

        .. doctest::

            >>> import jax, numpyro_spikeslab as nss
            >>> X = jax.random.normal(jax.random.key(0), (30, 3))
            >>> X = X.at[:, 2].set(2 * X[:, 0])      # no data tell them apart
            >>> y = X[:, 0] + 0.3 * jax.random.normal(jax.random.key(1), 30)
            >>> model = nss.models.sparse_regression()
            >>> guide = nss.PairedGuide(model)
            >>> svi = nss.CAVI(model, guide)
            >>> result = svi.run(jax.random.key(2), 120, X, y, progress_bar=False)
            >>> guide.credible_sets(result.params, X, y)[["effect", "size"]]
                 effect  size
            set
            0         0     2
        """
        check_limits(coverage, min_correlation)
        reading = self._read(args, kwargs)
        if got := single_effects.misfit(reading.form, self.blocks):
            expected = "columns of one design, as in `X @ w`, with a spike each, and no blocks"
            remedy = "For draws there is numpyro_spikeslab.credible_sets."
            raise bad("PairedGuide.credible_sets", got, expected, remedy)
        columns = single_effects.columns_of(reading.form.pairs, site)
        effects = compiled(partial(effects_of, reading), self.pack(reading, params))
        sets = single_effects.sets_of(effects, columns, coverage, min_correlation)
        return single_effects.table_of(sets, reading.form.pairs)

    @full_precision
    def effects(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> Effects | None:
        """Compute what credible sets need, also within ``jit``; `None` if there are none."""
        reading = self._read(args, kwargs)
        if single_effects.misfit(reading.form, self.blocks):
            return None
        return compiled(partial(effects_of, reading), self.pack(reading, params))

    @full_precision
    def to_init_params(
        self,
        params: dict[str, Any],
        *args: Any,
        rng_key: Array | None = None,
        num_chains: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Make start values of chains from a fit, for ``MCMC.run(..., init_params=...)``.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param rng_key: random key of draws from the guide; without it, chains start at its medians.
        :param num_chains: number of chains, the leading axis of the values; `None` for no axis.
        :param kwargs: keyword arguments of the model.
        :return: ``{site: value}`` for all latent sites that :meth:`sample_posterior` draws. A block
            of NUTS takes the value ``biject_to(support).inv(value)``, as NumPyro's kernels do.

        **Example**

        .. doctest::

            >>> import jax, numpyro_spikeslab as nss
            >>> X = jax.random.normal(jax.random.key(0), (30, 3))
            >>> y = X[:, 0] + 0.3 * jax.random.normal(jax.random.key(1), 30)
            >>> model = nss.models.sparse_regression()
            >>> guide = nss.PairedGuide(model)
            >>> svi = nss.CAVI(model, guide)
            >>> result = svi.run(jax.random.key(1), 120, X, y, progress_bar=False)
            >>> start = guide.to_init_params(result.params, X, y, num_chains=4)
            >>> start["w_spike"].shape, start["sigma"].shape
            ((4, 3), (4,))
        """
        shape = () if num_chains is None else (num_chains,)
        if rng_key is None:
            medians = self.median(params, *args, **kwargs)
            draws = {k: jnp.broadcast_to(x, (*shape, *jnp.shape(x))) for k, x in medians.items()}
        else:
            draws = self.sample_posterior(rng_key, params, *args, sample_shape=shape, **kwargs)
        values = {name: draws[name] for name in [*self.sites.sampled, *self.sites.others]}
        # a fit may reach the end of the interval, where no chain can start
        for name, point in self.points.sites.items():
            if point.support == constraints.unit_interval:
                values[name] = jnp.clip(values[name], 1e-6, 1 - 1e-6)
        return values
