# SPDX-License-Identifier: Apache-2.0
"""Coordinate ascent variational inference behind NumPyro's SVI interface."""

from collections.abc import Callable
from functools import partial
from typing import Any
import warnings

from jaxtyping import Array
import numpy as np
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

from numpyro.distributions import biject_to
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.infer.svi import SVIState
from numpyro.optim import _NumPyroOptim
from numpyro.util import identity

from numpyro_spikeslab.fitting.ascent import Progress, advance, begin, improve
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.posterior import (
    FunctionFactors,
    Posterior,
    bound,
    data_of,
    renewed,
    spec_of,
    strong,
)
from numpyro_spikeslab.fitting.refusals import (
    refuse,
    refuse_other_guide,
    refuse_other_state,
    refuse_outside,
)
from numpyro_spikeslab.fitting.run import (
    CAVIRunResult,
    Plan,
    Task,
    check_end,
    check_starts,
    checked_params,
    one_blas_thread,
    run_traced,
    stages,
    within,
)
from numpyro_spikeslab.fitting.schedules import annealing
from numpyro_spikeslab.fitting.starts import start_alone, start_random
from numpyro_spikeslab.fitting.stochastic import Known, stream_of
from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.reading.checks import FITTED
from numpyro_spikeslab.reading.form import param_name
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reader, Reading

NUM_IMPROVEMENTS = 10
"""Of the free sites beside latent functions, before a fit of these starts."""

AUTOMATIC: Any = "automatic"
"""The temperature of a CAVI that was given none."""


class CAVI(SVI):
    """Fits a :class:`~numpyro_spikeslab.PairedGuide` or :class:`~numpyro_spikeslab.MeanFieldGuide`.

    An :class:`~numpyro.infer.SVI` whose step is a sweep of closed-form updates of all pairs
    (supplement, section 1.1), followed by the maximisation of the same bound over the other latent
    sites, each at its maximum a posteriori as :class:`~numpyro.infer.autoguide.AutoDelta` has it,
    and over the model's params. There is no Monte Carlo in it: losses are the exact negative
    evidence lower bound, which never rises at temperature 1. Where sites stand at a point it bounds
    the density there, which may be above the evidence, so bounds compare fits of one model, and not
    models. Noise and slab scales with a HalfNormal prior and inclusion probabilities with a Beta or
    Uniform one have closed forms, and so have params of the model in their place whose constraint
    leaves none out, and coefficients: Normal sites in which the location is affine, such as an
    intercept, which follow the weights where they can (see the page on guides; elsewhere centre
    columns beside an intercept). All other latent sites climb after each sweep.

    :param model: a model whose one observed Normal site is affine in its spike-and-slab weights.
    :param guide: the guide of this model. Its inner guide must be an ``AutoDelta``.
    :param temperature: maps a step to the temperature that divides the logits of the inclusion
        probabilities, as an optax schedule maps; `None` is temperature 1 throughout. The default
        is :func:`annealing`, which needs at least 100 steps, and 1 with latent functions.
    :param num_restarts: number of starts; :meth:`run` keeps the one of the best bound. The first is
        the guide's own start; the others draw ``gamma`` uniformly and ``mu`` from the slab's prior,
        begin at temperature 1, and run beside it in one :func:`jax.vmap`. Defaults to 1, and to 2
        with latent functions, unless they are fitted ``plain``, to a sparse array or from a given
        state or values. A run warns where the best bound is 5 nats above the next.
    :param plain: with latent functions, the plain variational EM of the paper's supplement, for
        comparison: no moves, and one random start unless ``num_restarts`` says more.
    :param num_tasks: with latent functions, number of all tasks where a call has a batch of them.
        Then :meth:`update` is a stochastic step: it settles the weights of the batch, and takes
        what the batch says, times ``num_tasks / batch size``, for what all tasks say. States keep
        that, and weights of the last batch. Losses are the negative bound, estimated for all tasks.
        :meth:`run` stays the ordinary fit of the tasks that it is given: of a first batch, it is
        the start to recommend. The default, `None`, is for tasks that are all there.
    :param learning_rate: maps a step on a batch to the weight of what the batch says, in [0, 1], as
        an optax schedule maps; at 0 a step settles weights and leaves all that tasks share. The
        default is :func:`~numpyro_spikeslab.fitting.schedules.forgetting`,
        ``(10 + step) ** -0.7``, which ends at an optimum and does not forget its start at once.
    :param static_kwargs: static keyword arguments of the model, as in SVI.
    :raises TypeError: if the guide is of another class.
    :raises ValueError: at ``init`` or ``run``, if the model does not fit or the data are bad; the
        message names the site and the remedy. If ``plain`` is given without latent functions, or
        ``learning_rate`` without ``num_tasks``; at ``update``, if the batch does not fit these.

    A model whose observed Normal site has the location ``offset + W phi``, with ``phi`` from
    :func:`~numpyro_spikeslab.latent_functions`, such as :func:`~numpyro_spikeslab.models.mtmkl`, is
    fitted by sweeps that visit each function with the scale of its weights and the parameters of
    its kernel. Between them come rounds of moves (rotations of the functions, dropping one), each
    accepted if the exact bound says so after twelve sweeps; a round is one step. Functions that are
    all ``"white"`` have other moves, after a warm-up of turns towards sparse weights in one step.
    Runs of fewer than twelve steps, and :meth:`update`, make no moves. Starts are the random one of
    :meth:`init`, the singular vectors of the tasks, and random ones, one after the other; the best
    goes on after its first round without success, or after the warm-up. Fit in float64.

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
        temperature: Callable[[Any], Any] | None = AUTOMATIC,
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
            raise ValueError(f"CAVI: num_restarts must be at least 1, got {num_restarts}.")
        if temperature is not AUTOMATIC and temperature is not None and not callable(temperature):
            raise ValueError(
                f"CAVI: temperature must map a step to a temperature, got {temperature!r}. For a "
                f"constant one write `lambda step: {temperature!r}`."
            )
        # an optimiser with nothing to do: a state holds the parameters themselves
        optimiser = _NumPyroOptim(lambda: (identity, identity, identity))
        super().__init__(model, guide, optimiser, TraceGraph_ELBO(), **static_kwargs)
        self.temperature = temperature
        self.num_restarts = num_restarts
        self.plain = plain
        self.stream = stream_of(num_tasks, learning_rate)
        self._read = Reader(model, "CAVI", guide.joint)
        self._last_data: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"optim": None, "_last_data": None}

    # What a call works with

    def _task(self, args: tuple, kwargs: dict[str, Any]) -> Task:
        every = {**kwargs, **self.static_kwargs}
        # its errors say more than those of the guide
        reading = self._read(args, every)
        if self.guide.model is not self.model:
            refuse_other_guide(self.guide, self.model, reading)
        self.guide.set_up(args, every, (reading.program, reading.form.pairs))
        refuse(self.guide, self.plain, reading)
        temperature = self.temperature
        # of a pickle it is an equal string, not the same one
        if temperature == AUTOMATIC:
            temperature = annealing if reading.functions is None else None
        spec = spec_of(reading, self.plain, temperature)
        if self._last_data is None or self._last_data[0] is not reading:
            # of millions of weights, and new with each batch
            start = self._start(reading) if reading.form.free else {}
            names = {site: param_name(site, self.guide.prefix, start) for site in reading.form.free}
            data = data_of(reading, {site: biject_to(start[x][1]) for site, x in names.items()})
            if not are_concrete(data):
                return Task(reading, spec, data)
            self._last_data = reading, data
        return Task(reading, spec, self._last_data[1])

    def _start(self, reading: Reading) -> dict[str, tuple[Any, Any]]:
        """Start value and constraint of each parameter of the guide and the model."""
        own, known = self.guide._params.items(), reading.params
        found = self.guide.start() | {name: (known[name], x) for name, x in own if name in known}
        # the guide may have been set up where supports were others
        for site, support in reading.supports.items():
            name = param_name(site, self.guide.prefix, found)
            found[name] = within(support, found[name][0]), support
        return found

    # The interface of SVI

    @full_precision
    def init(
        self, rng_key: Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> SVIState:
        """The initial state; its parameters are constrained.

        :param rng_key: random key.
        :param args: arguments of the model.
        :param init_params: values of some parameters, instead of the guide's start.
        :param kwargs: keyword arguments of the model.
        :raises ValueError: if the model does not fit, or ``init_params`` do not.
        """
        task = self._task(args, kwargs)
        state = self._init(rng_key, task, init_params)
        if self.stream is not None:
            return self._streamed(task, state, self._known(task, state))
        # all that an update returns, so that compiled loops can carry it
        posterior = self._progress(task, state, state.optim_state[2]).posterior
        return SVIState((*state.optim_state[:2], posterior), None, state.rng_key)

    def _init(self, rng_key: Array, task: Task, init_params: Any) -> SVIState:
        start = self._start(task.reading)
        params = _values(start)
        given = checked_params(init_params or {}, start)
        rng_key, _, key_start = random.split(rng_key, 3)
        posterior = None
        if task.reading.functions is not None and set(params) - set(given):
            posterior = self._start_functions(task, params, given, key_start)
            params = self.guide.unpack(task.reading, posterior, params)
        if given:
            params = self.guide.without_lost_slopes(task.spec.form, params | given)
            posterior = None
        self.constrain_fn = identity
        return SVIState((jnp.array(0), params, posterior), None, rng_key)

    def _start_functions(
        self, task: Task, params: dict[str, Any], given: dict[str, Any], key: Any
    ) -> Posterior:
        """Random weights, the functions that follow from them; free sites at their maximum."""
        spec, data = task.spec, task.data
        if not are_concrete((data, params)):
            raise ValueError(
                "CAVI: fits of models with latent functions cannot start under a transformation "
                "such as jit or vmap; the moves between optima are decided outside of compiled "
                "code. Call init and run outside of it."
            )
        posterior = self._blank(task, params | given)
        if spec.form.free and not given:
            # or else the functions explain what the free sites should
            alone = improve(spec, data, start_alone(spec, data, posterior), NUM_IMPROVEMENTS)
            values = {site: alone.values[site] for site in spec.form.free}
            posterior = posterior._replace(values=posterior.values | values)
        return start_random(spec, data, posterior, key)

    def _blank(self, task: Task, params: dict[str, Any]) -> Posterior:
        """Values of all other sites, with weights and functions to be started."""
        reading, form = task.reading, task.spec.form
        values = {x: params[param_name(x, self.guide.prefix, params)] for x in form.others}
        weights = self.guide.factors.pack(form, params)
        known = reading.functions
        assert known is not None
        zero, theta = jnp.zeros_like(known.mean), known.theta(values)
        functions = FunctionFactors(zero, zero, zero, zero, zero[:, 0], zero, theta, theta)
        return Posterior(weights, functions, values, None)

    def get_params(self, svi_state: SVIState) -> dict[str, Any]:
        """Parameters of the guide and the model.

        :param svi_state: a state.
        """
        return svi_state.optim_state[1]

    @full_precision
    def update(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, Any]:
        """One sweep over the pairs and one maximisation over everything else.

        :param svi_state: the current state.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: the new state and the exact negative bound at it; with ``num_tasks`` an estimate.
        """
        task = self._task(args, kwargs)
        if self.stream is not None:
            known, loss = self.stream.update(task, self._known(task, svi_state))
            return self._streamed(task, svi_state, known), loss
        progress, _ = advance(task.spec, task.data, self._progress(task, svi_state), 1, -1.0)
        return self._state(task, svi_state, progress), progress.loss

    def stable_update(self, svi_state: SVIState, *args: Any, **kwargs: Any):
        """The same as :meth:`update`, whose closed forms cannot diverge."""
        return self.update(svi_state, *args, **kwargs)

    @full_precision
    def evaluate(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> Any:
        """The exact negative bound at a state; with ``num_tasks`` an estimate for all tasks, from
        the weights that the functions of the state give to the batch.

        :param svi_state: a state.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        task = self._task(args, kwargs)
        if self.stream is not None:
            return self.stream.evaluate(task, self._known(task, svi_state))
        return -_bound(task.spec, task.data, self._posterior(task, svi_state))

    @full_precision
    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SVIState | None = None,
        init_params: dict[str, Any] | None = None,
        tol: float | None = None,
        **kwargs: Any,
    ) -> CAVIRunResult:
        """Run at most ``num_steps`` steps.

        Ctrl-C ends the run with a warning and its last state.

        :param rng_key: random key; it matters for restarts and latent functions only.
        :param num_steps: number of steps.
        :param args: arguments of the model.
        :param progress_bar: whether to show a progress bar.
        :param stable_update: as in SVI; all updates are stable.
        :param forward_mode_differentiation: as in SVI; must be false, for there is nothing to
            choose.
        :param init_state: state to go on from.
        :param init_params: values of some parameters, instead of the guide's start.
        :param tol: stop when a step at temperature 1 changes the bound by at most ``tol`` nats;
            with latent functions, once no move is accepted any more.
        :param kwargs: keyword arguments of the model.
        :return: the result of the start with the best bound.
        :raises ValueError: if ``num_steps``, the model or ``init_params`` do not fit.
        :raises FloatingPointError: if the bound is not a number in the end.
        """
        if not isinstance(num_steps, int | np.integer) or num_steps < 1:
            raise ValueError(f"CAVI.run: num_steps must be a positive integer, got {num_steps}.")
        if forward_mode_differentiation:
            raise ValueError("CAVI.run: forward_mode_differentiation must be False.")
        task = self._task(args, kwargs)
        state = init_state or self._init(rng_key, task, init_params)
        number = self.num_restarts or 1
        if task.reading.functions is not None and self.num_restarts is None:
            given = init_state or init_params
            number = 1 if given or self.plain or task.data.layout else 2
        own = state.optim_state[2] if init_state is None else None
        progress = self._progress(task, state, own)
        task.reading.name_uncentred("CAVI.run", FITTED, progress.posterior.slopes)
        plan = Plan(number, int(num_steps), -1.0 if tol is None else tol)
        if not are_concrete((task.data, progress)):
            begun = 0 if init_state is None else state.optim_state[0]
            progress, joined = run_traced(task, state.rng_key, progress, plan, begun)
            new = self._state(task, state, progress)
            converged = None if tol is None else progress.converged
            return CAVIRunResult(self.get_params(new), new, joined, converged)
        losses: list[Any] = []
        restarts = None
        with one_blas_thread(task), tqdm(total=num_steps, disable=not progress_bar) as bar:
            try:
                for stage in stages(task, state.rng_key, progress, plan, bar):
                    progress = stage.progress
                    losses.append(stage.losses)
                    restarts = stage.restarts if number > 1 and restarts is None else restarts
            except KeyboardInterrupt:
                if not losses:
                    raise
                warnings.warn(
                    "CAVI.run was interrupted; its last state is the result. Go on with "
                    "`init_state=result.state`.",
                    stacklevel=3,
                )
        joined = jnp.asarray(np.concatenate(losses))
        check_end(task, progress, np.asarray(joined), init_params is not None)
        check_starts(restarts)
        new = self._state(task, state, progress)
        converged = None if tol is None else progress.converged
        return CAVIRunResult(self.get_params(new), new, joined, converged, restarts)

    # States

    def _posterior(self, task: Task, state: SVIState) -> Posterior:
        """The posterior of a state; what parameters leave open is that of the data."""
        posterior: Any = state.optim_state[2] if len(state.optim_state) > 2 else None
        packed = partial(self.guide.pack, task.reading, self.get_params(state))
        fresh = posterior is None or not posterior.is_laid_out(task.spec.form)
        posterior = packed() if fresh else posterior
        refuse_other_state(self.guide, posterior, task.reading)
        if fresh or posterior.functions is None:
            return self.guide.with_slopes(task.spec.form, posterior, self.get_params(state))
        return posterior._replace(functions=renewed(posterior.functions, packed().functions))

    def _progress(self, task: Task, state: SVIState, posterior: Any = None) -> Progress:
        posterior = posterior or self._posterior(task, state)
        refuse_outside(posterior, task.reading)
        return begin(task.spec, task.data, posterior, state.optim_state[0])

    def _state(self, task: Task, state: SVIState, progress: Progress) -> SVIState:
        # as many as in init, for another number would have to be compiled
        rng_key, *_ = random.split(state.rng_key, 3)
        params = self.guide.unpack(task.reading, progress.posterior, strong(self.get_params(state)))
        return SVIState((progress.step, params, progress.posterior), None, rng_key)

    def _known(self, task: Task, state: SVIState) -> Known:
        """What batches have told; of the state of an ordinary fit, what its tasks say of all."""
        assert self.stream is not None
        step, _, posterior, *told = state.optim_state
        if told:
            return Known(step, posterior, *told)
        return self.stream.start(task, posterior or self._posterior(task, state), step)

    def _streamed(self, task: Task, state: SVIState, known: Known) -> SVIState:
        params, last = strong(self.get_params(state)), state.optim_state[2]
        if last is not None and last.weights.probs.shape != task.spec.form.shape:
            params = _values(self._start(task.reading))
        params = self.guide.unpack(task.reading, known.posterior, params)
        rng_key, *_ = random.split(state.rng_key, 3)
        return SVIState((known.step, params, *known[1:]), None, rng_key)


def _values(start: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Copies of start values, for a state may be donated."""
    return strong({name: jnp.array(value) for name, (value, _) in start.items()})


_bound = jax.jit(bound, static_argnums=0)
