# SPDX-License-Identifier: Apache-2.0
"""The base class of the guides: sites of a model, parameters, draws and summaries."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoGuide

from numpyro_spikeslab.algebra.quantiles import quantiles as quantiles_of
from numpyro_spikeslab.fitting import function_sites, guide_factors
from numpyro_spikeslab.fitting.guide_factors import PairFactors, Start, check_params
from numpyro_spikeslab.fitting.model_sites import ModelSites, deterministics, sites_of
from numpyro_spikeslab.fitting.points import Points, points_of
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.fitting.slopes import Followed, Slopes, find_slopes
from numpyro_spikeslab.models.primitives import weights
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.model_run import ModelTrace, abstract_trace, trace_model
from numpyro_spikeslab.reading.program import compiled
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import Pair, find_pairs, observed_sites
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision
from numpyro_spikeslab.support.priors import base_of


class SpikeSlabGuide(AutoGuide):
    """The base of the guides: a family for the pairs, functions, and points for all other sites.

    The first call with the model's arguments notes sites, shapes and start values, and no data.

    - **factors** - the variational family of the pairs.
    - **points** - the other sites, at one value each.
    """

    joint = False
    """Whether the family needs all features as columns of one design, in one block."""

    follows = True
    """Whether Normal sites follow the weights."""

    def __init__(self, model: Callable, factors: PairFactors, init_loc_fn: Callable) -> None:
        super().__init__(model, prefix=factors.prefix, init_loc_fn=init_loc_fn)
        self.factors = factors
        self.points = Points(self.prefix, {}, {})
        self._sites: ModelSites | None = None

    @property
    def user(self) -> str:
        """The name of the class, for error messages."""
        return type(self).__name__

    @property
    def sites(self) -> ModelSites:
        """The sites of the model.

        :raises ValueError: if the guide has never been called.
        """
        if self._sites is None:
            raise ValueError(
                f"{self.user}: the guide has never been called. Call it once with the model's "
                "arguments, `numpyro.handlers.seed(guide, 0)(X, y)`, or give them to the summary."
            )
        return self._sites

    def set_up(self, args: tuple, kwargs: dict[str, Any], traced: ModelTrace | None = None) -> None:
        """Note the sites of the model and where they start, if this is the first call.

        :param traced: the model at these arguments, where it has been read.
        """
        if self._sites is not None:
            return
        if traced is None:
            pairs_of = partial(find_pairs, user=self.user)
            traced = trace_model(self.model, args, kwargs, self.user, pairs_of)
        call, trace, sites = (args, kwargs), traced.sites, sites_of(self.user, traced)
        self._check_model(sites, trace, call)
        self.points, self._slab_scales = points_of(self, sites, trace, call)
        self._slopes: dict[str, Slopes] = {}
        if self.follows and not sites.functions:
            responses = observed_sites(trace) or sites.predicted
            self._slopes = find_slopes(trace, sites.others, sites.pairs, responses)
        self._prototype_frames = {x.name: x for plates in sites.plates.values() for x in plates}
        self._prototype_frame_full_sizes = sites.plate_sizes
        self._takes_arguments = bool(args or kwargs)
        self._sites = sites

    def _check_model(self, sites: ModelSites, trace: dict[str, Any], call: Any) -> None:
        """Refuse a model that the family does not take, and note facts that the family needs."""

    @full_precision
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Sample all sites of the guide, for the arguments of the model."""
        self.set_up(args, kwargs)
        self.sites.check_call(self.user, self.model, (args, kwargs))
        within = partial(self._within, self._create_plates(*args, **kwargs))
        values = self.points.sample(within, self._slopes)
        run = self._run_at(values, args, kwargs)
        params = guide_factors.declared(self._start_of_weights())
        for pair in self.sites.pairs:
            scale = jnp.broadcast_to(base_of(run[pair.slab]["fn"]).scale, pair.shape)
            values |= self.factors.sample(pair, params, scale, within)
        if self._slopes:
            values |= self._sample_followers(params, values, within)
        for name in self.sites.functions:
            with within(name):
                values[name] = function_sites.sample(run, name, self.prefix)
        return values

    def _sample_followers(
        self, params: dict[str, Any], values: dict[str, Any], within: Callable
    ) -> dict[str, Any]:
        """Sample the sites that follow the weights; ``values`` are those at the weights' mean."""
        changes, followers = [], {}
        for p in self.sites.pairs:
            w = weights(p.of_weights(values[p.spike]), values[p.slab])
            changes.append(jnp.ravel(w - jnp.reshape(self._mean(p, params), p.shape)))
        for name, kind in self._slopes.items():
            factors = kind.factors(jnp.concatenate(changes))
            slopes, event_dim = params[self._slope_name(name)], self.points.sites[name].event_dim
            with within(name):
                followed = Followed(values[name], slopes, factors, event_dim)
                followers[name] = numpyro.sample(name, followed)
        return followers

    def _slope_name(self, site: str) -> str:
        return f"{site}_{self.prefix}_slope"

    def _run_at(self, values: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the model at given values of its other sites, for its priors."""
        pairs = self.sites.pairs
        zero = {name: jnp.zeros(shape) for p in pairs for name, shape in p.shapes.items()}
        model = handlers.seed(handlers.substitute(self.model, data=zero | values), random.key(0))
        # params of the model stay visible, for handlers that set them
        with handlers.block(hide_fn=lambda site: site["type"] != "param"):
            return handlers.trace(model).get_trace(*args, **kwargs)

    @contextmanager
    def _within(self, plates: dict[str, Any], site: str) -> Iterator[None]:
        with ExitStack() as stack:
            for frame in self.sites.plates[site]:
                plate = plates[frame.name]
                if plate.dim != frame.dim:
                    # weights and coefficients of tasks have the plate of tasks at other dims
                    plate = numpyro.plate(frame.name, plate.size, frame.size, frame.dim)
                stack.enter_context(plate)
            yield

    def _start_of_weights(self) -> Start:
        """Start value and constraint of the parameters of the pairs, and of the slopes."""
        starts: Start = {}
        for pair in self.sites.pairs:
            scale = jnp.broadcast_to(self._slab_scales[pair.name], pair.shape)
            starts |= self.factors.start(pair, scale)
        for name, kind in self._slopes.items():
            starts[self._slope_name(name)] = jnp.zeros(kind.shape), constraints.real
        return starts

    def start(self) -> Start:
        """Start value and constraint of each parameter."""
        starts = self.points.start() | self._start_of_weights()
        for name in self.sites.functions:
            starts |= function_sites.start(name, self.sites.shapes[name], self.prefix)
        return starts

    def pack(self, reading: Reading, params: dict[str, Any]) -> Posterior:
        """Make the posterior of parameters."""
        form, functions = reading.form, None
        terms: tuple[str, ...] = ()
        starts = jax.eval_shape(lambda: {name: x for name, (x, _) in self.start().items()})
        shapes: dict[str, Any] = {name: x.shape for name, x in starts.items()}
        if form.functions is not None:
            # of a batch of tasks, or at other inputs
            terms = function_sites.names(form.functions, self.prefix)
            shapes = dict.fromkeys(self.factors.names(form.pairs[0].name), form.pairs[0].shape)
            shapes |= dict.fromkeys(terms, reading.functions.mean.shape)
        check_params(params, shapes)
        others = params | self.points.values(params)
        values = {site: others[site] for site in form.others}
        if terms:
            functions = function_sites.pack(reading, [params[x] for x in terms], values)
        size = form.size if form.is_design else form.num_features
        slopes = {
            site: self._slopes[site].laid_out(params[self._slope_name(site)], size)
            for site in self._followers(form)
        }
        betas = {k: tuple(params[x] for x in self.points.names(k)) for k in self.points.betas}
        weights = self.factors.pack(form, params)
        return Posterior(weights, functions, values, None, slopes, betas=betas)

    def _followers(self, form: Form) -> list[str]:
        """Coefficients that follow the weights in a fit: of tasks all or none."""
        names = [site for site in form.coefficients if site in self._slopes]
        if form.is_design:
            return names
        all_follow = form.shares_features and form.of_tasks and len(names) == len(form.of_tasks)
        return names if all_follow and form.keeps_products else []

    def unpack(self, posterior: Posterior) -> dict[str, Any]:
        """Make the parameters of a posterior."""
        shape = posterior.weights.probs.shape
        pairs = [pair.in_batch(shape) for pair in self.sites.pairs]
        params = self.factors.unpack(pairs, posterior.weights)
        for site, value in posterior.values.items():
            names = (site,) if site in self.sites.params else self.points.names(site)
            params |= zip(names, posterior.betas.get(site, (value,)), strict=True)
        for site, kind in self._slopes.items():
            slopes = posterior.slopes.get(site, jnp.zeros(kind.shape))
            params[self._slope_name(site)] = kind.laid_out(slopes, kind.shape[-1])
        if posterior.functions is not None:
            sites = function_sites.names(self.sites.functions[0], self.prefix)
            params |= zip(sites, (posterior.functions.alpha, posterior.functions.h), strict=True)
        return params

    @property
    def blocks(self) -> dict[str, list[list[int]]] | None:
        """The blocks of each site, once the guide has been called; `None` without blocks."""
        return self.factors.blocks

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the guide's auxiliary sites that give these ``draws``."""
        return self.factors.auxiliary_values(self.sites.pairs, draws)

    def _moments(self, pair: Pair, params: dict[str, Any]) -> list[Any]:
        """Inclusion probabilities, and means and standard deviations of the slabs if included."""
        pair = self._checked(pair, params)
        return guide_factors.moments(self.factors.marginals(pair, params), pair.shape)

    def _checked(self, pair: Pair, params: dict[str, Any]) -> Pair:
        """The weights of parameters, perhaps of a batch of tasks."""
        name = self.factors.names(pair.name)[0]
        check_params(params, {name: None})
        return pair.in_batch(jnp.shape(params[name]))

    def inclusion_probabilities(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the posterior inclusion probability ``gamma`` of each weight.

        :param params: parameters, as from ``svi.get_params(state)`` or ``result.params``.
        :return: ``{name: array in the shape of the weights}``.
        :raises ValueError: as all summaries, before the first call or if a parameter is missing.
        """
        return {pair.name: self._moments(pair, params)[0] for pair in self.sites.pairs}

    @full_precision
    def posterior_mean(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the posterior mean ``<w> = gamma mu`` of each weight and each latent function.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model; without them latent functions are left out.
        :param kwargs: keyword arguments of the model.
        :return: ``{name: array in the shape of the site}``.
        """
        if args or kwargs:
            self.set_up(args, kwargs)
        means = {pair.name: self._mean(pair, params) for pair in self.sites.pairs}
        moments = self._function_moments(params, args, kwargs)
        return means | {name: mean for name, (mean, _) in moments.items()}

    def _mean(self, pair: Pair, params: dict[str, Any]) -> Any:
        probs, loc, _ = self._moments(pair, params)
        return probs * loc

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> Reading:
        reading = Reader(self.model, self.user)(args, kwargs)
        self.set_up(args, kwargs, reading.trace)
        if reading.functions is None:
            self.sites.check_reading(self.user, reading)
        return reading

    def _function_moments(
        self, params: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        """Means and variances of the latent functions at the inputs, if these are given."""
        if not self.sites.functions or (self._takes_arguments and not args and not kwargs):
            return {}
        reading = self._read(args, kwargs)
        if reading.form.functions is None:
            return {}
        functions: Any = self.pack(reading, params).functions
        return {reading.form.functions: (functions.mean, functions.var)}

    @full_precision
    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draw all latent sites that observations depend on, and the deterministic sites.

        :param rng_key: random key.
        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param sample_shape: leading shape of the draws.
        :param kwargs: keyword arguments of the model.
        """
        self.set_up(args, kwargs)
        computed_sites = deterministics(abstract_trace(self.model, args, kwargs))

        def draw(params):
            key_guide, key_model = random.split(rng_key)
            draws = Predictive(
                self,
                params=params,
                num_samples=prod(sample_shape),
                return_sites=[*self.sites.others, *self.sites.sampled],
                parallel=True,
            )(key_guide, *args, **kwargs)
            for p in self.sites.pairs:
                draws[p.name] = weights(p.of_weights(draws[p.spike]), draws[p.slab])
            missing = [name for name in computed_sites if name not in draws]
            if missing:
                predictive = Predictive(self.model, draws, params=params, return_sites=missing)
                draws |= predictive(key_model, *args, **kwargs)
            return {name: x.reshape(sample_shape + x.shape[1:]) for name, x in draws.items()}

        # in one piece, for operation by operation takes several times as long to compile
        return compiled(draw, params)

    @full_precision
    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the posterior median of each latent site; see :meth:`quantiles`.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model; without them latent functions are left out.
        :param kwargs: keyword arguments of the model.
        """
        return self.quantiles(params, 0.5, *args, **kwargs)

    @full_precision
    def quantiles(
        self, params: dict[str, Any], quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Compute posterior quantiles of each weight, each spike and each other latent site.

        A weight's distribution has an atom at zero, so its quantiles may be exactly 0. Those of a
        slab are given inclusion. A site which follows the weights has its value at their mean.

        :param params: parameters, as from ``result.params``.
        :param quantiles: Q probabilities, or one.
        :param args: arguments of the model; without them latent functions are left out.
        :param kwargs: keyword arguments of the model.
        :return: ``{site: array of shape (Q, ...)}``; without the leading axis for one probability.
        """
        levels = np.asarray(quantiles, float)
        if levels.ndim > 1 or not np.all((levels >= 0) & (levels <= 1)):
            expected = "probabilities between 0 and 1, one or a list"
            raise bad(f"{self.user}.quantiles", repr(quantiles), expected)
        if args or kwargs:
            self.set_up(args, kwargs)
        flat = levels.reshape(-1)
        values = self.points.quantiles(params, flat)
        for pair in self.sites.pairs:
            pair = self._checked(pair, params)
            marginals = self.factors.marginals(pair, params)
            q = jnp.asarray(flat, marginals[0][1].mean.dtype)
            parts = [(*quantiles_of(x, q), q[:, None] > 1 - x.probs) for _, x in marginals]
            weight, slab, spike = (
                guide_factors.in_order(marginals, x, pair.shape) for x in zip(*parts, strict=True)
            )
            values |= {pair.name: weight, pair.slab: slab}
            values[pair.spike] = pair.of_spikes(spike.astype(int))
        for name, (mean, variance) in self._function_moments(params, args, kwargs).items():
            q = jnp.reshape(jnp.asarray(flat, mean.dtype), (-1, 1, 1))
            values[name] = dist.Normal(mean, jnp.sqrt(variance)).icdf(q)
        return values if levels.ndim else {name: x[0] for name, x in values.items()}
