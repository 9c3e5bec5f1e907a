# SPDX-License-Identifier: Apache-2.0
"""Coordinate ascent variational inference behind NumPyro's SVI interface."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.infer.svi import SVIState
from numpyro.optim import _NumPyroOptim
from numpyro.util import identity

from numpyro_spikeslab.fitting.ascent import CHUNK, advance, begin, improve
from numpyro_spikeslab.fitting.features import engine_of
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.posterior import Engine, FunctionFactors, Posterior, strong
from numpyro_spikeslab.fitting.refusals import (
    check_state,
    checked_params,
    refuse,
    refuse_traced_functions,
)
from numpyro_spikeslab.fitting.run import (
    Call,
    CAVIRunResult,
    Plan,
    check_end,
    check_starts,
    run_stages,
    run_traced,
)
from numpyro_spikeslab.fitting.schedules import annealing, check_schedule
from numpyro_spikeslab.fitting.starts import start_alone, start_random
from numpyro_spikeslab.fitting.stochastic import stream_of
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import param_name
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision

# Improvements of the free sites beside latent functions, before a fit of functions starts.
NUM_IMPROVEMENTS = 10
# Nats per observation. Plateaus that a fit leaves again have steps of 7e-7 and more.
TOLERANCE = 1e-7
# Options of SVI that change nothing: updates are stable, and there is nothing to differentiate.
WITHOUT_EFFECT = ("stable_update", "forward_mode_differentiation")


class CAVI(SVI):
    """Fits a :class:`~numpyro_spikeslab.PairedGuide` or :class:`~numpyro_spikeslab.MeanFieldGuide`.

    An :class:`~numpyro.infer.SVI` whose step is a sweep of closed-form updates of all pairs
    (supplement, section 1.1), followed by the maximisation of the same bound over the other latent
    sites, each at its maximum a posteriori as in :class:`~numpyro.infer.autoguide.AutoDelta`, and
    over the model's params. Losses are the exact negative evidence lower bound, which never rises
    at temperature 1. Where sites stand at a point it bounds the density there, which may be above
    the evidence. So bounds compare fits of one model, and not models. Auxiliary variables of a
    likelihood have a factor of their own, which is at its optimum.

    Noise and slab scales with a HalfNormal prior and inclusion probabilities with a Beta or Uniform
    one have closed forms. So have params of the model in their place, and coefficients: Normal
    sites in which the location is affine, such as an intercept, which follow the weights where they
    can (see the page on guides; elsewhere centre columns beside an intercept). A Beta prior with a
    concentration below 1 has no maximum; there inclusion has a Beta factor instead of a point. All
    other latent sites climb after each sweep.

    :param model: a model with one observed site, whose density depends on the spike-and-slab
        weights through a predictor that is affine in them, and is Normal or has auxiliary
        variables: Bernoulli, Binomial, negative binomial, Student-t and Laplace ones, see the page
        on other likelihoods.
    :param guide: the guide of this model.
    :param temperature: maps a step to the temperature that divides the logits of the inclusion
        probabilities; `None` is temperature 1 throughout. The default is :func:`annealing`, which
        needs at least 100 steps, and 1 with latent functions.
    :param num_restarts: number of starts; :meth:`run` keeps the one of the best bound. The first is
        the guide's own. The others draw ``gamma`` uniformly and ``mu`` from the slab's prior, begin
        at temperature 1, and run beside it in one :func:`jax.vmap`. Defaults to 1, and to 2 with
        latent functions, unless they are fitted ``plain``, to a sparse array or from a given state
        or values. A run warns if the best bound is 5 nats above the next, or if the best start
        includes no weight and others do.
    :param plain: with latent functions, the plain variational EM of the paper's supplement: no
        moves, and one random start unless ``num_restarts`` says more.
    :param num_tasks: with latent functions, the number of all tasks if each call has a batch. Then
        :meth:`update` is a stochastic step, whose losses are estimates for all tasks; states have
        the weights of the last batch. :meth:`run` remains the ordinary fit of the tasks it is
        given; a run on a first batch is the recommended start.
    :param learning_rate: maps a step on a batch to the weight of its statistics, in [0, 1]; at 0 a
        step updates the weights alone. The default is
        :func:`~numpyro_spikeslab.fitting.schedules.forgetting`, ``(10 + step) ** -0.7``.
    :param static_kwargs: static keyword arguments of the model, as in SVI.
    :raises TypeError: if the guide is of another class.
    :raises ValueError: at ``init`` or ``run``, if the model does not fit or the data are bad; at
        ``update``, if a batch does not fit ``num_tasks``. The message names the site and the
        remedy.

    Latent functions are fitted by sweeps that visit each function with the scale of its weights and
    the parameters of its kernel. Between them come rounds of moves (rotations of the functions,
    dropping one), each accepted if the exact bound is higher after twelve sweeps; a round is one
    step. Functions that are all ``"white"`` have other moves, after a warm-up of rotations in one
    step. Runs of fewer than twelve steps, and :meth:`update`, make no moves. Starts are the random
    one of :meth:`init`, the singular vectors of the tasks, and random ones, one after the other;
    the best goes on after its first round without success, or after the warm-up. Fit in float64.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", expected_size=1)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (50, 3))
        >>> y = 2 * X[:, 1] + 0.1 * jax.random.normal(jax.random.key(1), (50,))
        >>> guide = nss.PairedGuide(model)
        >>> svi = nss.CAVI(model, guide)
        >>> result = svi.run(jax.random.key(2), 200, X, y, progress_bar=False)
        >>> abs(guide.posterior_mean(result.params)["w"]).round(1).tolist()
        [0.0, 2.0, 0.0]
    """

    def __init__(
        self,
        model: Callable,
        guide: SpikeSlabGuide,
        *,
        temperature: Any = "automatic",
        num_restarts: int | None = None,
        plain: bool = False,
        num_tasks: int | None = None,
        learning_rate: Callable[[Any], Any] | None = None,
        **static_kwargs: Any,
    ) -> None:
        if not isinstance(guide, SpikeSlabGuide):
            raise TypeError(
                f"CAVI: guide must be a PairedGuide or a MeanFieldGuide, got "
                f"{type(guide).__name__}. Fit other guides with numpyro.infer.SVI."
            )
        if num_restarts is not None and num_restarts < 1:
            raise bad("CAVI: num_restarts", num_restarts, "at least 1")
        if temperature != "automatic":
            check_schedule("temperature", temperature)
        # an optimiser with nothing to do: a state holds the parameters themselves
        optimiser = _NumPyroOptim(lambda: (identity, identity, identity))
        super().__init__(model, guide, optimiser, TraceGraph_ELBO(), **static_kwargs)
        self.temperature = temperature
        self.num_restarts = num_restarts
        self.plain = plain
        self.stream = stream_of(num_tasks, learning_rate)
        self._read = Reader(model, "CAVI", guide.joint)
        self._last: Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"optim": None, "_last": None}

    # The model and data of a call

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        all_kwargs = {**kwargs, **self.static_kwargs}
        for name in WITHOUT_EFFECT:
            all_kwargs.pop(name, None)
        # the errors of the reader are more precise than the guide has
        reading = self._read(args, all_kwargs)
        self.guide.set_up(args, all_kwargs, reading.trace)
        if self._last is not None and self._last.reading is reading:
            return self._last
        refuse(self.guide, self.plain, reading, self.stream is not None)
        temperature = self.temperature
        # of a pickle it is an equal string, not the same one
        if temperature == "automatic":
            temperature = annealing if reading.functions is None else None
        engine, like = engine_of(reading, self.plain, temperature), None
        if self.stream is None:
            like = jax.eval_shape(lambda: self.guide.pack(reading, _values(self._start(reading))))
        call = Call(reading, engine, like)
        if are_concrete(engine):
            self._last = call
        return call

    def _start(self, reading: Reading) -> dict[str, tuple[Any, Any]]:
        """Return start value and constraint of each parameter of the guide and the model."""
        self.guide.sites.check_reading("CAVI", reading)
        params = self.guide.sites.params
        start = self.guide.start() | {k: (x, params[k]) for k, x in reading.params.items()}
        # supports may depend on data, and the guide has been set up with others
        for site, support in reading.supports.items():
            name = param_name(site, self.guide.prefix, start)
            start[name] = _within(support, start[name][0]), support
        return start

    def _posterior(self, call: Call, state: SVIState) -> Posterior:
        """Return the posterior of a state of the same data."""
        posterior = state.optim_state[1]._replace(batches=None)
        # batches may differ in size
        if call.like is not None:
            check_state(posterior, call.like)
        return posterior

    # The interface of SVI

    @full_precision
    def init(
        self, rng_key: Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> SVIState:
        """Make the initial state.

        :param init_params: values of some parameters, instead of the guide's start.
        :raises ValueError: if the model does not fit, or ``init_params`` do not.
        """
        call = self._call(args, kwargs)
        state = self._init(rng_key, call, init_params)
        if self.stream is None:
            return state
        return SVIState(self.stream.start(call, *state.optim_state), None, state.rng_key)

    def _init(self, rng_key: Array, call: Call, init_params: Any) -> SVIState:
        start, functions = self._start(call.reading), call.reading.functions
        params = _values(start)
        chosen = checked_params(init_params or {}, start)
        rng_key, _, key_start = random.split(rng_key, 3)
        begins = functions is not None and set(params) - set(chosen)
        if begins:
            posterior = self._start_functions(call, params, chosen, key_start)
            params = self.guide.unpack(posterior)
        if chosen or not begins:
            posterior = self.guide.pack(call.reading, params | chosen)
        self.constrain_fn = identity
        return SVIState((jnp.array(0), strong(posterior)), None, rng_key)

    def _start_functions(
        self, call: Call, params: dict[str, Any], chosen: dict[str, Any], key: Any
    ) -> Posterior:
        """Draw random weights, fit functions to them, and set free sites to their maximum."""
        reading, engine, _ = call
        refuse_traced_functions(reading, (engine, params))
        params, functions = params | chosen, reading.functions
        known = params | self.guide.points.values(params)
        values = {x: known[x] for x in engine.form.others}
        zero, theta = jnp.zeros_like(functions.mean), functions.theta(values)
        blank = FunctionFactors(zero, zero, zero, zero, zero[:, 0], zero, theta, theta)
        betas = self.guide.points.betas
        weights = self.guide.factors.pack(engine.form, params)
        posterior = Posterior(weights, blank, values, None, betas=betas)
        if engine.form.free and not chosen:
            # first the free sites, or the functions absorb their effect
            alone = improve(engine, start_alone(engine, posterior), NUM_IMPROVEMENTS)
            values = {site: alone.values[site] for site in engine.form.free}
            posterior = posterior._replace(values=posterior.values | values)
        return start_random(engine, posterior, key)

    def get_params(self, svi_state: SVIState) -> dict[str, Any]:
        """Make the parameters of the guide and the model from a state.

        :raises ValueError: before any call.
        """
        return self.guide.unpack(svi_state.optim_state[1])

    @full_precision
    def update(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, Any]:
        """Make one sweep over the pairs and one maximisation over everything else.

        :return: the new state and the exact negative bound at it; with ``num_tasks`` an estimate.
        """
        call = self._call(args, kwargs)
        # as many keys as in init, for another number would have to be compiled
        rng_key, *_ = random.split(svi_state.rng_key, 3)
        if self.stream is not None:
            step, posterior, loss = self.stream.step(call, svi_state.optim_state)
            return _state(rng_key, step, posterior), loss
        progress = begin(call.engine, self._posterior(call, svi_state), svi_state[0][0])
        progress, _ = advance(call.engine, progress, 1, -1.0, CHUNK)
        return _state(rng_key, progress.step, progress.posterior), progress.loss

    # its closed forms cannot diverge
    stable_update = update

    @full_precision
    def evaluate(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> Any:
        """Return the exact negative bound at a state; with ``num_tasks`` an estimate for all tasks,
        from the weights that the functions of the state give to the batch."""
        call = self._call(args, kwargs)
        if self.stream is not None:
            return self.stream.step(call, svi_state.optim_state, 0.0)[2]
        return -_bound(call.engine, self._posterior(call, svi_state))

    @full_precision
    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: SVIState | None = None,
        init_params: dict[str, Any] | None = None,
        tol: float | None = TOLERANCE,
        **kwargs: Any,
    ) -> CAVIRunResult:
        """Run at most ``num_steps`` steps. Ctrl-C ends the run with a warning and its last state.

        :param rng_key: random key; it matters for restarts and latent functions only.
        :param init_state: state of a run of the same data, to go on from. For other data give
            ``init_params=result.params``.
        :param init_params: values of some parameters, instead of the guide's start.
        :param tol: stop when a step at temperature 1 changes the bound by at most ``tol`` nats per
            observation that is not masked; with latent functions, once no move is accepted any
            more. The default is 1e-7, so 10,000 more steps, if none gains more, would raise the
            bound by at most 1e-3 nats per observation. `None` takes all steps.
        :param kwargs: keyword arguments of the model. The options ``stable_update`` and
            ``forward_mode_differentiation`` of SVI have no effect, here and in ``update``.
        :return: the result of the start with the best bound.
        :raises ValueError: if ``num_steps``, the model or ``init_params`` do not fit.
        :raises FloatingPointError: if the bound is not a number in the end.
        """
        if not isinstance(num_steps, int | np.integer) or num_steps < 1:
            raise bad("CAVI.run: num_steps", num_steps, "a positive integer")
        call = self._call(args, kwargs)
        state = init_state or self._init(rng_key, call, init_params)
        posterior = self._posterior(call, state)
        one = self.plain or init_state or init_params
        number = self.num_restarts or (1 if one else call.engine.features.num_starts)
        threshold = -1.0 if tol is None else tol * call.reading.num_counted
        plan = Plan(number, int(num_steps), threshold)
        progress, starts = begin(call.engine, posterior, state.optim_state[0]), None
        rng_key, key_starts, _ = random.split(state.rng_key, 3)
        if are_concrete((call.engine, progress)):
            progress, losses, starts = run_stages(call, key_starts, progress, plan, progress_bar)
            check_end(call, progress, losses, init_params is not None)
            check_starts(starts, progress.posterior.weights)
        else:
            refuse_traced_functions(call.reading, (call.engine, progress))
            begun = 0 if init_state is None else state.optim_state[0]
            progress, losses = run_traced(call, key_starts, progress, plan, begun)
        converged = None if tol is None else progress.converged
        restarts = None if starts is None else starts.bounds
        new = _state(rng_key, progress.step, progress.posterior)
        return CAVIRunResult(self.get_params(new), new, jnp.asarray(losses), converged, restarts)


def _state(rng_key: Array, step: Any, posterior: Posterior) -> SVIState:
    """Make the next state, without the residual, which depends on the data."""
    return SVIState((step, posterior.moved()), None, rng_key)


def _values(start: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Copy start values, since a state may be donated."""
    return strong({name: jnp.array(value) for name, (value, _) in start.items()})


def _within(support: Any, value: Any) -> Any:
    """Return a start value, or another where it is not in the support."""
    inside = jnp.all(support(value))
    if are_concrete(inside) and inside:
        return value
    return jnp.where(inside, value, support.feasible_like(jnp.asarray(value)))


_bound = jax.jit(Engine.bound)
