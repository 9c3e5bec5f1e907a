# SPDX-License-Identifier: Apache-2.0
"""What the variational families share as NumPyro autoguides."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_spikeslab.fitting.guide_factors import PairFactors, declared
from numpyro_spikeslab.fitting.inner import (
    is_among,
    kernel_starts,
    make_inner,
    makes_delta,
    predicted_sites,
    refuse_discrete,
    run_once,
    set_delta,
)
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.fitting.slopes import Followed, Slopes, along_all, along_own, find_slopes
from numpyro_spikeslab.fitting.summaries import PosteriorSummaries
from numpyro_spikeslab.fitting.tasks import keeps_products
from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.priors import base_of
from numpyro_spikeslab.reading.form import (
    COLUMNS,
    SHARED,
    Form,
    Pair,
    find_function_sites,
    find_pairs,
    is_latent,
    observed_sites,
    param_name,
)
from numpyro_spikeslab.reading.model_run import abstract_trace, run_model
from numpyro_spikeslab.reading.program import computed, outside_transformations
from numpyro_spikeslab.reading.reader import Reading


def _latents(trace: dict[str, Any]) -> dict[str, Any]:
    """Latent sample sites, and params."""
    return {k: x for k, x in trace.items() if x["type"] == "param" or is_latent(trace, k)}


def _noted(site: dict[str, Any]) -> tuple[Any, ...]:
    """Shape, support and plates; of the values in a support the numbers, for arrays may be data."""
    shape = jax.tree.map(jnp.shape, site["value"])
    if site["type"] == "param":
        return shape, *_noted_support(site["kwargs"].get("constraint"))
    return shape, *_noted_support(site["fn"].support), tuple(site["cond_indep_stack"])


def _noted_support(support: Any) -> tuple[Any, ...]:
    numbers = [x for x in jax.tree.leaves(support) if isinstance(x, int | float)]
    return type(support), numbers


def _deterministics(trace: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, site in trace.items() if site["type"] == "deterministic")


def _is_no_param(site: dict[str, Any]) -> bool:
    return site["type"] != "param"


class SpikeSlabGuide(PosteriorSummaries):
    """What the families share: the other latent sites, plates, and posterior summaries.

    A guide keeps names, shapes and start values of what it has been called with, and no data: all
    summaries depend on their arguments alone.
    """

    joint = False
    """Whether the family needs all features as columns of one design, in one block."""

    follows = True
    """Whether Normal sites beside the weights follow them."""

    def __init__(
        self,
        model: Callable,
        factors: PairFactors,
        *,
        prefix: str,
        inner_guide: Callable[..., AutoGuide],
    ) -> None:
        super().__init__(model, prefix=prefix)
        self.factors = factors
        self.inner_guide = inner_guide
        self.inner: AutoGuide | None = None
        self.pairs: tuple[Pair, ...] = ()
        self.functions: tuple[str, ...] = ()
        self._precision: Any = None
        self._noted: dict[str, Any] = {}
        self._key: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_key": None}

    # Setting up

    def set_up(self, args: tuple, kwargs: dict[str, Any], key: Any = None) -> None:
        """Note sites and start values, anew where the sites are others.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :param key: the program and the pairs of the model at these arguments, where they are known.
            While they are the same, so are the sites.
        """
        new = self.prototype_trace is None or self._precision != jnp.result_type(float)
        if not new and key is not None and key == self._key:
            return
        trace = abstract_trace(self.model, args, kwargs)
        if new or not self._fits(trace, args, kwargs):
            self._set_up_sites(trace, args, kwargs)
        self._was_observed |= bool(observed_sites(trace))
        self._deterministics = _deterministics(trace)
        self._key = key

    def _fits(self, trace: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the sites that were noted are there as they were, and others are only to be
        predicted."""
        latents = _latents(trace)
        noted = {name: _noted(site) for name, site in latents.items() if name in self._noted}
        if noted != self._noted or self._find_pairs(trace) != self.pairs:
            return False
        more = frozenset(latents) - set(noted)
        if more and not more <= predicted_sites(self, trace, latents, (args, kwargs)):
            return False
        observed = observed_sites(trace)
        # what is to be predicted may be in other plates than what was observed
        if not observed and (self._was_observed or not more):
            return True
        return self._find_slopes(trace, observed or more) == self._slopes

    def _set_up_sites(self, trace: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> None:
        # what follows may fail, and then the guide must not pass for one that has been set up
        self.prototype_trace = None
        self._was_observed = False
        self.pairs = self._find_pairs(trace)
        self.functions = self._find_functions(trace)
        own = {k: shape for pair in self.pairs for k, shape in pair.shapes.items()}
        own |= {name: jnp.shape(trace[name]["value"]) for name in self.functions}
        latents = _latents(trace)
        predicted = predicted_sites(self, trace, latents, (args, kwargs))
        latents = {name: site for name, site in latents.items() if name not in predicted}
        self._params = {
            name: site["kwargs"].get("constraint", constraints.real)
            for name, site in latents.items()
            if site["type"] == "param"
        }
        self._others = tuple(name for name in latents if name not in {*own, *self._params})
        refuse_discrete(type(self).__name__, self._others, latents)
        self._slopes = self._find_slopes(trace, observed_sites(trace) or predicted)
        sampled = [*self._slopes, *(name for p in self.pairs for name in p.shapes)]
        self._frames = {name: latents[name]["cond_indep_stack"] for name in sampled}
        self._function_plates = {
            name: [frame.name for frame in trace[name]["cond_indep_stack"]]
            for name in self.functions
        }
        self._prototype_frames = {f.name: f for frames in self._frames.values() for f in frames}
        self._prototype_frame_full_sizes = {
            name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"
        }
        self._setup_start(own, trace, predicted, args, kwargs)
        self._precision = jnp.result_type(float)
        self._noted = {name: _noted(site) for name, site in latents.items()}
        self._shapes = {k: x[0] for k, x in self._noted.items() if k not in self._params}
        # the values of an abstract trace are no values
        self.prototype_trace = {
            name: {key: site[key] for key in ("name", "type", "is_observed") if key in site}
            for name, site in trace.items()
        }

    def _find_pairs(self, trace: dict[str, Any]) -> tuple[Pair, ...]:
        return find_pairs(trace, type(self).__name__)

    def _find_functions(self, trace: dict[str, Any]) -> tuple[str, ...]:
        """Refuse latent functions; only :class:`PairedGuide` has factors for them."""
        names = tuple(name for name in find_function_sites(trace) if is_latent(trace, name))
        if names:
            raise ValueError(
                f"{type(self).__name__}: the model has the latent functions {list(names)}. Use "
                "PairedGuide."
            )
        return ()

    def _find_slopes(self, trace: dict[str, Any], responses: frozenset[str]) -> dict[str, Slopes]:
        """Sites that follow the weights.

        :param responses: names of the observed sites, or of those that are to be predicted.
        """
        if not self.follows or self.functions or not makes_delta(self.inner_guide):
            return {}
        return find_slopes(trace, self._others, self.pairs, responses)

    def _setup_start(
        self,
        own: dict[str, Any],
        trace: dict[str, Any],
        predicted: frozenset[str],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """Start values of the slabs' scales and of the inner guide, compiled in one piece."""
        hidden = frozenset([*own, *_deterministics(trace), *predicted])
        self.inner = probe = None
        if self._others:
            self.inner = make_inner(self, own, hidden)
            if type(self.inner) is AutoDelta:
                # its start is that of the prior
                probe = make_inner(self, own, hidden | observed_sites(trace))
                # NumPyro's search for a start compiles the gradient of all densities, of which a
                # start at prior means needs none
                probe.model = handlers.mask(probe.model, mask=False)

        def found():
            zero = {name: jnp.zeros(shape) for name, shape in own.items()}
            values = {}
            if probe is not None:
                run_once(probe, args, kwargs)
                values = probe._init_locs
                values |= {k: x for k, x in kernel_starts(trace).items() if k in values}
            run = run_model(self.model, args, kwargs, zero | values)
            scales = {p.name: base_of(run[p.slab]["fn"]).scale * jnp.ones(()) for p in self.pairs}
            return values, {k: (run[k]["fn"], run[k]["value"]) for k in values}, scales

        # start values must not be tracers, which outlive no transformation
        init_locs, sites, self._slab_scales = computed(found)
        if self.inner is not None and probe is None:
            with outside_transformations((args, kwargs)):
                run_once(self.inner, args, kwargs)
        if self.inner is not None and probe is not None:
            set_delta(self.inner, probe, init_locs, sites)

    # Calling

    @full_precision
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.set_up(args, kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        if self.inner is not None:
            with handlers.block(hide_fn=partial(is_among, frozenset(self._slopes))):
                result = dict(self.inner(*args, **kwargs))
        model = self._model_at(result, args, kwargs)
        with handlers.trace() as seen:
            for pair in self.pairs:
                scale = jnp.broadcast_to(base_of(model[pair.slab]["fn"]).scale, pair.shape)
                within = partial(self._within, plates)
                result |= self.factors.sample(pair, self._start_pair(pair), scale, within)
        if self._slopes:
            result |= self._sample_followers(seen, result, plates)
        return result | self._sample_functions(model, result)

    def _sample_followers(self, seen: dict[str, Any], values: dict[str, Any], plates: Any) -> dict:
        """Sites that follow the weights.

        :param seen: the sites of the pairs, and their parameters.
        :param values: with the sites that follow at their mean.
        """
        assert self.inner is not None
        params = {name: site["value"] for name, site in seen.items() if site["type"] == "param"}
        marginals, changes = self._marginals(params), []
        for p in self.pairs:
            w = weights(p.of_weights(values[p.spike]), values[p.slab])
            changes.append(jnp.ravel(w - jnp.reshape(marginals[p.name].mean, p.shape)))
        found = {}
        for name, kind in self._slopes.items():
            start = jnp.zeros(kind.shape), constraints.real
            (slopes,) = declared({self._slope_name(name): start})
            change = kind.against(jnp.concatenate(changes))
            point = Followed(values[name], slopes, change, self.inner._event_dims[name])
            with self._within(plates, name):
                found[name] = numpyro.sample(name, point)
        return found

    def _slope_name(self, site: str) -> str:
        return f"{site}_{self.prefix}_slope"

    def _model_at(self, values: dict[str, Any], args, kwargs) -> dict[str, Any]:
        """A run of the model at given values of its other latent sites, for its priors."""
        zero = {k: jnp.zeros(shape) for p in self.pairs for k, shape in p.shapes.items()}
        known = handlers.substitute(self.model, data=zero | values)
        model = handlers.seed(known, random.key(0))
        # the model's params stay in sight: what is fitted to them must arrive here
        with handlers.block(hide_fn=_is_no_param):
            return handlers.trace(model).get_trace(*args, **kwargs)

    @contextmanager
    def _within(self, plates: dict[str, Any], site: str) -> Iterator[None]:
        with ExitStack() as stack:
            for frame in self._frames[site]:
                plate = plates[frame.name]
                if plate.dim != frame.dim:
                    # a plate of tasks is another dim of weights than of what each task has once
                    plate = numpyro.plate(frame.name, plate.size, frame.size, frame.dim)
                stack.enter_context(plate)
            yield

    def _start_pair(self, pair: Pair) -> dict[str, tuple[Any, Any]]:
        """Start value and constraint of each parameter of one pair, in the order of the family."""
        return self.factors.start(pair, jnp.broadcast_to(self._slab_scales[pair.name], pair.shape))

    def _start_functions(self, name: str) -> dict[str, tuple[Any, Any]]:
        """The same of latent functions."""
        return {}

    def start(self) -> dict[str, tuple[Any, Any]]:
        """Start value and constraint of each parameter, once the guide has been set up.

        The inner guide must be an AutoDelta.
        """
        found: dict[str, tuple[Any, Any]] = {}
        if self.inner is not None:
            for name, value in self.inner._init_locs.items():
                support = self.inner.prototype_trace[name]["fn"].support
                found[f"{name}_{self.prefix}_loc"] = value, support
        for pair in self.pairs:
            found |= self._start_pair(pair)
        for name, kind in self._slopes.items():
            found[self._slope_name(name)] = jnp.zeros(kind.shape), constraints.real
        for name in self.functions:
            found |= self._start_functions(name)
        return found

    def _sample_functions(self, model: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Declare the parameters of latent functions and sample them.

        :param model: a trace at ``values``.
        """
        return {}

    # Between parameters and what CAVI updates

    def pack(self, reading: Reading, params: dict[str, Any]) -> Posterior:
        """The posterior that parameters stand for."""
        form = reading.form
        medians = {} if makes_delta(self.inner_guide) else self._inner_median(params)
        values = {
            site: medians[site]
            if site in medians
            else params[param_name(site, self.prefix, params)]
            for site in form.others
        }
        slopes = self._pack_slopes(form, params)
        return Posterior(self.factors.pack(form, params), None, values, None, slopes)

    def _pack_slopes(self, form: Form, params: dict[str, Any]) -> dict[str, Any]:
        return {
            site: self._along(form, site, params[self._slope_name(site)], along_all, along_own)
            for site in self._following(form, params)
        }

    def _following(self, form: Form, params: dict[str, Any]) -> list[str]:
        """The coefficients that follow the weights: of columns those that have slopes, of tasks all
        or none."""
        names = [site for site in form.coefficients if self._slope_name(site) in params]
        if form.kind == COLUMNS:
            return names
        known = form.kind == SHARED and form.of_tasks and len(names) == len(form.of_tasks)
        return names if known and keeps_products(form) else []

    def _along(
        self, form: Form, site: str, slopes: Any, of_columns: Callable, of_tasks: Callable
    ) -> Any:
        """Slopes along all weights where these are columns, and along those of each task where they
        are tasks; parameters are either, by the plates of the site."""
        axis = self._slopes[site].axis
        own = {each.site: each.axis for each in form.of_tasks}
        if site in own and axis is None:
            return of_tasks(slopes, own[site])
        return slopes if site in own or axis is None else of_columns(slopes, axis)

    def unpack(self, form: Form, posterior: Posterior) -> dict[str, Any]:
        """Make the parameters of a posterior; slopes of sites that do not follow here are zero."""
        params = self.factors.unpack(form.pairs, posterior.weights)
        for site, value in posterior.values.items():
            params[site if site in self._params else f"{site}_{self.prefix}_loc"] = value
        for site, kind in self._slopes.items():
            slopes = jnp.zeros(kind.shape)
            if site in posterior.slopes:
                slopes = self._along(form, site, posterior.slopes[site], along_own, along_all)
            params[self._slope_name(site)] = slopes
        return params
