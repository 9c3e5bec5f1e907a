# SPDX-License-Identifier: Apache-2.0
"""Variational families of spike-and-slab weights, as NumPyro autoguides."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

from jaxtyping import Array
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoGuide
from numpyro.ops.provenance import eval_provenance

from numpyro_spikeslab.distributions import GaussianFunctions, SpikeSlab
from numpyro_spikeslab.paired import BLOCK_SIZE, MeanField, PairedMeanField
from numpyro_spikeslab.primitives import Functions, weights
from numpyro_spikeslab.reading.call import (
    RUN_ONCE,
    are_concrete,
    merge,
    outside_transformations,
    partition,
)
from numpyro_spikeslab.structure import (
    Pair,
    Structure,
    abstract_trace,
    find_pairs,
    is_latent,
    slab_prior,
    trace_at,
)
from numpyro_spikeslab.tasks import (
    TaskReader,
    concrete_functions,
    find_functions,
)


def _is_among(names: frozenset[str], site: dict[str, Any]) -> bool:
    """Module-level, so that guides pickle."""
    return site.get("name") in names


def _is_no_param(site: dict[str, Any]) -> bool:
    return site["type"] != "param"


def _run_once(guide: AutoGuide, args: tuple, kwargs: dict[str, Any]) -> None:
    with handlers.block(), handlers.seed(rng_seed=0):
        guide(*args, **kwargs)


def _standard_normal(shape: tuple[int, ...], key: jax.Array) -> Any:
    return random.normal(key, shape)


class _SpikeSlabGuide(AutoGuide):
    """What the families share: the other latent sites, plates, and posterior summaries."""

    block_size: int | None = BLOCK_SIZE

    def __init__(
        self,
        model: Callable,
        *,
        prefix: str = "auto",
        inner_guide: Callable[..., AutoGuide] = AutoDelta,
    ) -> None:
        super().__init__(model, prefix=prefix)
        self.inner_guide = inner_guide
        self.inner: AutoGuide | None = None
        self.pairs: tuple[Pair, ...] = ()
        self.functions: dict[str, Functions] = {}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        trace = abstract_trace(self.model, args, kwargs)
        self.pairs = self._find_pairs(trace)
        own = {name: pair.shape for pair in self.pairs for name in (pair.spike, pair.slab)}
        self._setup_functions(trace, args, kwargs)
        own |= {name: jnp.shape(trace[name]["value"]) for name in self.functions}
        latents = {
            name: site
            for name, site in trace.items()
            if site["type"] == "param" or (site["type"] == "sample" and not site["is_observed"])
        }
        self._params = tuple(name for name, site in latents.items() if site["type"] == "param")
        self._others = tuple(name for name in latents if name not in {*own, *self._params})
        discrete = [name for name in self._others if latents[name]["fn"].support.is_discrete]
        if discrete:
            raise ValueError(
                f"{type(self).__name__}: the discrete latent sites {discrete} are not part of a "
                "spike-and-slab pair. Sample them with `numpyro.infer.DiscreteGibbs` beside "
                "`PairedGibbs`."
            )
        self._deterministics = tuple(
            name for name, site in trace.items() if site["type"] == "deterministic"
        )
        self._frames = {pair.name: latents[pair.slab]["cond_indep_stack"] for pair in self.pairs}
        for frames in self._frames.values():
            self._prototype_frames |= {frame.name: frame for frame in frames}
        self._prototype_frame_full_sizes = {
            name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"
        }
        self._setup_slabs(args, kwargs, latents)
        if self._others:
            hidden = frozenset([*own, *self._deterministics])
            self.inner = self._make_inner(own, hidden)
            if type(self.inner) is AutoDelta:
                # its start is that of the prior
                observed = {k for k, x in trace.items() if x.get("is_observed")}
                probe = self._make_inner(own, hidden | observed)
                self._setup_delta(self.inner, probe, args, kwargs)
            else:
                # so that its start values do not become tracers
                with outside_transformations((args, kwargs)):
                    _run_once(self.inner, args, kwargs)
        # the values of an abstract trace are no values
        self.prototype_trace = {
            name: {key: site[key] for key in ("name", "type", "is_observed") if key in site}
            for name, site in trace.items()
        }

    def _make_inner(self, own: dict[str, Any], hidden: frozenset[str]) -> AutoGuide:
        model = handlers.substitute(
            handlers.seed(self.model, random.key(0)),
            data={name: np.zeros(shape) for name, shape in own.items()},
        )
        blocked = handlers.block(model, hide_fn=partial(_is_among, hidden))
        return self.inner_guide(blocked, prefix=self.prefix)

    def _setup_delta(self, inner: AutoGuide, probe: AutoGuide, args, kwargs) -> None:
        """Set up an AutoDelta in one compilation, where op by op there would be hundreds.

        :param probe: another one of the same sites, which may keep tracers.
        """
        static, dynamic = partition((args, kwargs))

        def found(dynamic):
            args, kwargs = merge(static, dynamic)
            _run_once(probe, args, kwargs)
            sites = {name: probe.prototype_trace[name] for name in self._others}
            return probe._init_locs, {k: (x["fn"], x["value"]) for k, x in sites.items()}

        with outside_transformations((args, kwargs)):
            inner._init_locs, sites = jax.jit(found, compiler_options=RUN_ONCE)(dynamic)
        keys = ("name", "type", "is_observed", "cond_indep_stack")
        inner.prototype_trace = {
            name: {key: probe.prototype_trace[name][key] for key in keys} | {"fn": fn, "value": x}
            for name, (fn, x) in sites.items()
        }
        for attribute in ("_event_dims", "_prototype_frames", "_prototype_frame_full_sizes"):
            setattr(inner, attribute, getattr(probe, attribute))

    def _find_pairs(self, trace: dict[str, Any]) -> tuple[Pair, ...]:
        return find_pairs(trace, type(self).__name__)

    def _setup_functions(self, trace: dict[str, Any], args, kwargs) -> None:
        """Refuse latent functions; only :class:`PairedGuide` has factors for them."""
        names = find_functions(trace)
        if names:
            raise ValueError(
                f"{type(self).__name__}: the model has the latent functions {list(names)}. Use "
                "PairedGuide."
            )

    def _sample_functions(self, values: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _setup_slabs(self, args, kwargs, latents) -> None:
        """Prior scales of the slabs, and whether they are the same whatever the model is given."""
        static, dynamic = partition((args, kwargs))

        def scales(dynamic, values):
            args, kwargs = merge(static, dynamic)
            trace = trace_at(self.model, args, kwargs, values)
            return {pair.name: slab_prior(trace, pair)[1] for pair in self.pairs}

        values = {name: latents[name]["value"] for name in self._others + self._params}
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), values
        )
        sources = eval_provenance(scales, dynamic=dynamic, values=shapes)
        self._constant_slabs = not any(sources.values())
        with outside_transformations((args, kwargs)):
            found = jax.jit(scales)(dynamic, {})
        # starts must not be tracers, which outlive no transformation
        self._slab_scales = (
            found
            if are_concrete(found)
            else jax.tree.map(lambda x: np.ones(x.shape, x.dtype), found)
        )

    def _prior_scales(self, latents: dict[str, Any], args, kwargs) -> dict[str, Any]:
        """Prior scale of each slab, given the other latent sites."""
        if self._constant_slabs:
            return self._slab_scales
        seeded = handlers.substitute(handlers.seed(self.model, random.key(0)), data=latents)
        # the model's params stay in sight: what is fitted to them must arrive here
        with handlers.block(hide_fn=_is_no_param):
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        return {pair.name: slab_prior(trace, pair)[1] for pair in self.pairs}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {} if self.inner is None else dict(self.inner(*args, **kwargs))
        scales = self._prior_scales(result, args, kwargs)
        for pair in self.pairs:
            result |= self._sample_pair(pair, scales[pair.name], self._within(pair, plates))
        return result | self._sample_functions(result)

    @contextmanager
    def _within(self, pair: Pair, plates: dict[str, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for frame in self._frames[pair.name]:
                stack.enter_context(plates[frame.name])
            yield

    @abstractmethod
    def _sample_pair(self, pair: Pair, prior_scale: Any, within: Any) -> dict[str, Any]:
        """Declare the parameters of one pair and sample its two sites ``within`` its plates."""

    @abstractmethod
    def pack(self, structure: Structure, params: dict[str, Any]) -> Any:
        """The arrays that :class:`~numpyro_spikeslab.CAVI` updates."""

    @abstractmethod
    def unpack(self, structure: Structure, posterior: Any) -> dict[str, Any]:
        """The inverse of :meth:`pack`."""

    @abstractmethod
    def _marginal(self, pair: Pair, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Inclusion probability, and mean and standard deviation of the slab where included."""

    def inclusion_probabilities(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior inclusion probability ``gamma`` of each weight.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :return: ``{name: array in the shape of the weights}``.
        """
        return {pair.name: self._marginal(pair, params)[0] for pair in self.pairs}

    def posterior_mean(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior mean ``<w> = gamma mu`` of each weight.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :return: ``{name: array in the shape of the weights}``.
        """
        return {name: marginal.mean for name, marginal in self._marginals(params).items()}

    def _marginals(self, params: dict[str, Any]) -> dict[str, SpikeSlab]:
        marginals = {}
        for pair in self.pairs:
            probs, loc, scale = self._marginal(pair, params)
            marginals[pair.name] = SpikeSlab(probs, scale, loc)
        return marginals

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draw from the guide: all latent sites and the model's deterministic sites.

        :param rng_key: random key.
        :param params: parameters of the guide.
        :param args: arguments of the model, as for the fit.
        :param sample_shape: leading shape of the draws.
        :param kwargs: keyword arguments of the model.
        """
        key_guide, key_model = random.split(rng_key)
        sites = [name for pair in self.pairs for name in (pair.spike, pair.slab)]
        sites += list(self.functions)
        draws = Predictive(
            self,
            params=params,
            num_samples=prod(sample_shape),
            return_sites=[*self._others, *sites],
            parallel=True,
        )(key_guide, *args, **kwargs)
        draws |= {p.name: weights(draws[p.spike], draws[p.slab]) for p in self.pairs}
        missing = [name for name in self._deterministics if name not in draws]
        if missing:
            predictive = Predictive(self.model, draws, params=params, return_sites=missing)
            draws |= predictive(key_model, *args, **kwargs)
        return {name: x.reshape(sample_shape + x.shape[1:]) for name, x in draws.items()}

    def median(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior median of each weight, each spike and each other latent site.

        The entry of a slab is its median given that the weight is included.
        """
        medians = {} if self.inner is None else self.inner.median(params)
        return medians | {name: x[0] for name, x in self._pair_quantiles(params, [0.5]).items()}

    def quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, Any]:
        """Posterior quantiles of each weight, each spike and each other latent site.

        A weight's distribution has an atom at zero, so its quantiles may be exactly 0. The entry
        of a slab holds its quantiles given that the weight is included.

        :param params: parameters of the guide.
        :param quantiles: Q probabilities.
        :return: ``{site: array of shape (Q, ...)}``.
        """
        found = self._pair_quantiles(params, quantiles)
        if isinstance(self.inner, AutoDelta):
            size = len(quantiles)
            medians = self.inner.median(params)
            found |= {k: jnp.broadcast_to(x, (size, *jnp.shape(x))) for k, x in medians.items()}
        elif self.inner is not None:
            found |= self.inner.quantiles(params, quantiles)
        return found

    def _pair_quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, Any]:
        found = {}
        for pair in self.pairs:
            probs, loc, scale = self._marginal(pair, params)
            q = jnp.reshape(jnp.asarray(quantiles), (-1,) + (1,) * len(pair.shape))
            found[pair.name] = SpikeSlab(probs, scale, loc).icdf(q)
            found[pair.spike] = (q > 1.0 - probs).astype(int)
            found[pair.slab] = dist.Normal(loc, scale).icdf(q)
        return found


class PairedGuide(_SpikeSlabGuide):
    """Paired mean field: each slab and its spike share a factor (paper, eq. 5).

    An :class:`~numpyro.infer.autoguide.AutoGuide`. The weights of ``spike_slab("w", ...)`` get the
    parameters, each in the shape of the weights,

    - ``w_{prefix}_probs``, the inclusion probability ``gamma``;
    - ``w_{prefix}_loc``, mean ``mu`` of the slab given inclusion;
    - ``w_{prefix}_scale``, its standard deviation given inclusion.

    Given exclusion the slab has its prior, as in the true posterior. The functions of
    ``latent_functions("phi", ...)`` are Gaussian, independent of each other: their prior times
    ``exp(linear * phi - precision * phi**2 / 2)`` at each input, with the parameters
    ``phi_{prefix}_precision`` and ``phi_{prefix}_linear``, each of shape (M, N). The optimum is of
    this form, and neither parameter needs the inverse of a covariance; :meth:`posterior_mean` has
    the means. All other latent sites get an inner autoguide.
    :class:`~numpyro_spikeslab.CAVI` fits it in closed form; it works as it is in
    :class:`~numpyro.infer.SVI` with :class:`~numpyro.infer.TraceGraph_ELBO` too.

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

    def _names(self, pair: Pair) -> list[str]:
        return [f"{pair.name}_{self.prefix}_{part}" for part in PairedMeanField._fields]

    def _sample_pair(self, pair: Pair, prior_scale: Any, within: Any) -> dict[str, Any]:
        probs_name, loc_name, scale_name = self._names(pair)
        start = self._slab_scales[pair.name]
        with within:
            probs = numpyro.param(
                probs_name, jnp.full_like(start, 0.5), constraint=constraints.unit_interval
            )
            loc = numpyro.param(loc_name, jnp.zeros_like(start))
            scale = numpyro.param(scale_name, start, constraint=constraints.softplus_positive)
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(
                pair.slab, dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            )
        return {pair.spike: spike, pair.slab: slab}

    def _marginal(self, pair: Pair, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        probs, loc, scale = (params[name] for name in self._names(pair))
        return probs, loc, scale

    def pack(self, structure: Structure, params: dict[str, Any]) -> PairedMeanField:
        return PairedMeanField(
            *(
                structure.join(params, f"{{}}_{self.prefix}_{part}")
                for part in PairedMeanField._fields
            )
        )

    def unpack(self, structure: Structure, posterior: PairedMeanField) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for part, values in zip(PairedMeanField._fields, posterior, strict=True):
            params |= structure.split(values, f"{{}}_{self.prefix}_{part}")
        return params

    # Latent functions

    def _setup_functions(self, trace: dict[str, Any], args, kwargs) -> None:
        self.functions = {
            name: concrete_functions(self.model, trace, name, args, kwargs)
            for name in find_functions(trace)
        }
        frames = {name: trace[name]["cond_indep_stack"] for name in self.functions}
        self._function_plates = {name: [f.name for f in x] for name, x in frames.items()}
        self._task_reader = TaskReader(self.model, type(self).__name__)
        # predictions need the data
        self.remember((args, kwargs) if are_concrete((args, kwargs)) else None)

    def remember(self, call: tuple[tuple, dict[str, Any]] | None) -> None:
        """Set the data, which :meth:`predict` needs: positional and keyword arguments."""
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.functions and are_concrete((args, kwargs)):
            # other inputs than those at the first call
            trace = abstract_trace(self.model, args, kwargs)
            self.functions = {
                name: concrete_functions(self.model, trace, name, args, kwargs)
                for name in self.functions
            }
        return super().__call__(*args, **kwargs)

    def _site_names(self, name: str) -> tuple[str, str]:
        return f"{name}_{self.prefix}_precision", f"{name}_{self.prefix}_linear"

    def _sample_functions(self, values: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for name, functions in self.functions.items():
            M, N = len(functions.templates), functions.num_inputs
            precision_name, linear_name = self._site_names(name)
            alpha = numpyro.param(
                precision_name, jnp.ones((M, N)), constraint=constraints.nonnegative
            )
            h = numpyro.param(linear_name, partial(_standard_normal, (M, N)))
            # the values of parameters that are observed are not the guide's
            missing = [site for site in functions.site_names if site not in values]
            if missing:
                values = values | self._observed_values(missing)
            mu = functions.mean_at(functions.X)
            posterior = GaussianFunctions(functions.covariances(values), mu, alpha, h)
            plate = self._function_plates[name][-1]
            with numpyro.plate(plate, M, dim=-1):
                result[name] = numpyro.sample(name, posterior)
        return result

    def _observed_values(self, names: list[str]) -> dict[str, Any]:
        args, kwargs = self._data
        with handlers.block():
            seeded = handlers.seed(self.model, random.key(0))
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        return {name: trace[name]["value"] for name in names}

    def _function_moments(self, params: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Means and variances of the functions at the inputs."""
        if not self.functions:
            return {}
        tasks, problem, _ = self._tasks_at(params)
        state = tasks.pack(params, self.prefix, problem)
        return {tasks.form.functions: (state.mean, state.var)}

    def _tasks_at(self, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The model as read, the problem and the location without functions."""
        tasks = self._task_reader(*self._data)
        return tasks, *tasks.hold(self.model, self._data, params, self.prefix)

    @property
    def _data(self) -> tuple[tuple, dict[str, Any]]:
        if self._call is None:
            raise ValueError(
                f"{type(self).__name__}: the guide was set up under a transformation such as jit, "
                "so it does not know the data. Call it, or CAVI.init, outside of it first."
            )
        return self._call

    def posterior_mean(self, params: dict[str, Any]) -> dict[str, Any]:
        """Posterior mean ``<w> = gamma mu`` of each weight, and of the latent functions.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :return: ``{name: array in the shape of the site}``.
        """
        functions = {name: mean for name, (mean, _) in self._function_moments(params).items()}
        return super().posterior_mean(params) | functions

    def _pair_quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, Any]:
        found = super()._pair_quantiles(params, quantiles)
        for name, (mean, variance) in self._function_moments(params).items():
            q = jnp.reshape(jnp.asarray(quantiles), (-1, 1, 1))
            found[name] = dist.Normal(mean, jnp.sqrt(variance)).icdf(q)
        return found

    def predict(
        self, params: dict[str, Any], X_new: Any = None, *, noise: bool = False
    ) -> tuple[Any, Any]:
        """Mean and variance of each task at new inputs, in closed form.

        For models with :func:`~numpyro_spikeslab.latent_functions`.

        :param params: parameters, as from ``result.params``.
        :param X_new: new inputs, shape (S,) or (S, D) as in the model. The default, the inputs of
            the data, is the only choice where a kernel is a matrix; give objects to be predicted
            there as inputs without responses.
        :param noise: whether to add the noise: predictions of observations instead of those of the
            noise-free tasks.
        :return: mean and variance, each of shape (S, Q).
        :raises ValueError: if the model has no latent functions, the guide has not been set up,
            the inputs are not finite or of another width, a kernel is a matrix, or the location
            without functions changes from input to input.
        """
        if not self.functions:
            raise ValueError(
                "PairedGuide.predict: the model has no latent functions, or the guide has not run "
                "yet. Use numpyro.infer.Predictive."
            )
        tasks, problem, offset = self._tasks_at(params)
        mean, variance, noises = tasks.predict(params, self.prefix, problem, offset, X_new)
        return mean, variance + noises if noise else variance

    def to_init_params(
        self,
        params: dict[str, Any],
        rng_key: Array | None = None,
        num_chains: int | None = None,
        unconstrained: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Start values of chains from a fit, for ``MCMC.run(..., init_params=...)``.

        :param params: parameters, as from ``result.params``.
        :param rng_key: random key of draws from the guide; without it, chains start at the guide's
            medians.
        :param num_chains: number of chains, the leading axis of the values; `None` for a single
            one.
        :param unconstrained: names of those sites that are left to an HMC block of
            :class:`~numpyro.infer.Gibbs`, which takes unconstrained values.
        :return: ``{site: value}`` for all latent sites.
        :raises ValueError: if ``unconstrained`` has names that are not latent sites.

        **Example**

        .. doctest::

            >>> import jax, jax.numpy as jnp
            >>> from tinygp import kernels
            >>> import numpyro_spikeslab as nss
            >>> model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2)
            >>> guide = nss.PairedGuide(model)
            >>> X = jnp.linspace(0, 4, 20)
            >>> Y = jnp.stack([jnp.sin(X), -jnp.sin(X), jnp.cos(X)], axis=1)
            >>> svi = nss.CAVI(model, guide, plain=True, num_restarts=1)
            >>> result = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
            >>> start = guide.to_init_params(result.params, jax.random.key(1), num_chains=4)
            >>> start["W_spike"].shape, start["phi"].shape, start["noise"].shape
            ((4, 3, 2), (4, 2, 20), (4, 3))
        """
        args, kwargs = self._data
        shape = () if num_chains is None else (num_chains,)
        if rng_key is None:
            found = self.median(params)
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


class MeanFieldGuide(_SpikeSlabGuide):
    """Standard mean field: slabs jointly Gaussian, independent of the spikes (paper, eq. 4).

    The family that the paired one is compared with; it has one mode and is sensitive to its
    start. The P weights of ``spike_slab("w", ...)``, flattened, get the parameters

    - ``w_slab_{prefix}_loc``, mean of the slabs, shape (P,);
    - ``w_slab_{prefix}_scale_tril``, Cholesky factor of their covariance, shape (P, P);
    - ``w_spike_{prefix}_probs``, the inclusion probabilities, in the shape of the weights.

    :param model: a model with exactly one :func:`~numpyro_spikeslab.spike_slab`.
    :param prefix: part of the parameters' names.
    :param inner_guide: as in :class:`PairedGuide`.
    :raises ValueError: when first called, as :class:`PairedGuide`, and for several pairs.
    """

    # the joint update of the slabs needs the Gram matrix of all features
    block_size = None

    def _find_pairs(self, trace: dict[str, Any]) -> tuple[Pair, ...]:
        pairs = super()._find_pairs(trace)
        if len(pairs) > 1:
            raise ValueError(
                f"MeanFieldGuide: the model has several spike_slab sites, "
                f"{[pair.name for pair in pairs]}; one is supported. Use PairedGuide."
            )
        return pairs

    def _names(self, pair: Pair) -> tuple[str, str, str]:
        return (
            f"{pair.spike}_{self.prefix}_probs",
            f"{pair.slab}_{self.prefix}_loc",
            f"{pair.slab}_{self.prefix}_scale_tril",
        )

    def _sample_pair(self, pair: Pair, prior_scale: Any, within: Any) -> dict[str, Any]:
        probs_name, loc_name, scale_name = self._names(pair)
        start = self._slab_scales[pair.name]
        loc = numpyro.param(loc_name, jnp.zeros(pair.size, start.dtype))
        scale_tril = numpyro.param(
            scale_name, jnp.diag(jnp.ravel(start)), constraint=constraints.lower_cholesky
        )
        # one event over all weights, so it is sampled outside their plates, as in AutoContinuous
        joint = numpyro.sample(
            self._auxiliary_name(pair),
            dist.MultivariateNormal(loc, scale_tril=scale_tril),
            infer={"is_auxiliary": True},
        )
        with within:
            probs = numpyro.param(
                probs_name, jnp.full_like(start, 0.5), constraint=constraints.unit_interval
            )
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(pair.slab, dist.Delta(joint.reshape(pair.shape)))
        return {pair.spike: spike, pair.slab: slab}

    def _auxiliary_name(self, pair: Pair) -> str:
        return f"_{pair.slab}_{self.prefix}_latent"

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the guide's auxiliary site that give the slabs of ``draws``."""
        (pair,) = self.pairs
        slab = draws[pair.slab]
        batch = slab.shape[: slab.ndim - len(pair.shape)]
        return {self._auxiliary_name(pair): slab.reshape(*batch, pair.size)}

    def _marginal(self, pair: Pair, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        probs, loc, scale_tril = (params[name] for name in self._names(pair))
        scale = jnp.sqrt(jnp.sum(scale_tril**2, axis=1))
        return probs, loc.reshape(pair.shape), scale.reshape(pair.shape)

    def pack(self, structure: Structure, params: dict[str, Any]) -> MeanField:
        (pair,) = structure.pairs
        probs, loc, scale_tril = (params[name] for name in self._names(pair))
        return MeanField(jnp.ravel(probs), loc, scale_tril)

    def unpack(self, structure: Structure, posterior: MeanField) -> dict[str, Any]:
        (pair,) = structure.pairs
        probs, loc, scale_tril = posterior
        values = (probs.reshape(pair.shape), loc, scale_tril)
        return dict(zip(self._names(pair), values, strict=True))
