# SPDX-License-Identifier: Apache-2.0
"""Coordinate ascent variational inference behind NumPyro's SVI interface."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import optax
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.svi import SVIState
from numpyro.optim import optax_to_numpyro
from numpyro.util import identity, not_jax_tracer

from numpyro_spikeslab import multitask
from numpyro_spikeslab.guide import MeanFieldGuide, PairedGuide
from numpyro_spikeslab.maximisation import climb, maximum
from numpyro_spikeslab.paired import Design, predictor
from numpyro_spikeslab.reading.call import are_concrete, merge, on_device, partition
from numpyro_spikeslab.structure import (
    Likelihood,
    Reader,
    Structure,
    checked_trace,
    evaluate,
    param_name,
    trace_at,
)
from numpyro_spikeslab.tasks import TaskReader, find_functions, problem_at, starts, steps


def annealing(step: Any) -> Any:
    """Default temperature of a step: ``20 * 0.97**step`` until it reaches 1, at step 99.

    Starting hot takes away the dependence on the start: on the Boston housing data the plain
    updates select several different models, the annealed ones always the same.
    """
    return jnp.maximum(20.0 * 0.97**step, 1.0)


NUM_IMPROVEMENTS = 10
"""Of the sites beside latent functions, before a fit of these starts."""

_NO_OPTIMISER = optax_to_numpyro(optax.identity())


class CAVIRunResult(NamedTuple):
    """What :meth:`CAVI.run` returns: the fields of NumPyro's ``SVIRunResult`` and one more.

    - **params** - the fitted parameters.
    - **state** - the last state.
    - **losses** - the exact negative evidence lower bound after every step. Under a transformation
      of the caller their number is fixed, and the last one fills the steps that ``tol`` saved.
    - **converged** - whether the run stopped by ``tol``; `None` if there was no ``tol``.
    """

    params: dict[str, Any]
    state: SVIState
    losses: Float[Array, " steps"]
    converged: Any


class Data(NamedTuple):
    """What a compiled run takes of its data.

    - **arguments** - arrays among the model's arguments.
    - **design** - the whitened design, `None` if it depends on other sites.
    - **at** - the model at zero weights, `None` if it depends on other sites.
    - **indices** - for each site with a role, which of its entries each weight takes.
    """

    arguments: list[Any]
    design: Design | None
    at: Likelihood | None
    indices: dict[str, Any]


class _Progress(NamedTuple):
    """Carried from sweep to sweep; ``losses`` begin with that of step ``first``."""

    first: Any
    step: Any
    params: dict[str, Any]
    loss: Any
    converged: Any
    losses: Any


class CAVI(SVI):
    """Fits a :class:`~numpyro_spikeslab.PairedGuide` or :class:`~numpyro_spikeslab.MeanFieldGuide`.

    An :class:`~numpyro.infer.SVI` whose step is a sweep of closed-form updates of all pairs
    (supplement, section 1.1), followed by the maximisation of the same bound over the other
    latent sites, each at its maximum a posteriori as
    :class:`~numpyro.infer.autoguide.AutoDelta` has it, and over the model's params. There is no
    Monte Carlo in it: losses are the exact negative evidence lower bound, which never rises at
    temperature 1.

    :param model: a model whose one observed Normal site is affine in its spike-and-slab weights.
    :param guide: the guide of this model. Its inner guide must be an ``AutoDelta``.
    :param temperature: maps a step to the temperature that divides the logits of the inclusion
        probabilities, as an optax schedule maps. Defaults to :func:`annealing`, which needs at
        least 99 steps; `None` is temperature 1 throughout.
    :param num_restarts: number of starts, run in one :func:`jax.vmap`; :meth:`run` keeps the one
        of the best bound. The first is the guide's own start, the others draw ``gamma`` uniformly
        and ``mu`` from the slab's prior. Defaults to 1, and to 2 with latent functions.
    :param plain: with latent functions, the plain variational EM of the paper's supplement, for
        comparison: one random start, no moves.
    :param static_kwargs: static keyword arguments of the model, as in SVI.
    :raises TypeError: if the guide is of another class.
    :raises ValueError: at ``init`` or ``run``, if the model does not fit or the data are bad; the
        message names the site and the remedy.

    A model whose observed Normal site has the location ``offset + W phi``, with ``phi`` from
    :func:`~numpyro_spikeslab.latent_functions`, such as :func:`~numpyro_spikeslab.models.mtmkl`, is
    fitted by sweeps that visit each function with the scale of its weights and the parameters of
    its kernel. Between them come rounds of moves (rotations of the functions, dropping one), each
    accepted if the exact bound says so after twelve sweeps. A round is one step, and a run goes on
    with sweeps when no move is accepted any more: some 50 steps from the start on the paper's toy
    data. Noise scales with a HalfNormal prior, an inclusion probability with a Beta one and a slab
    scale with a HalfNormal one, or model params in their place, have closed forms; all other
    latent sites climb after each sweep. Starts are the random one of :meth:`init`, the singular
    vectors of the tasks, and random ones; they run one after the other, and only the best goes on
    after the first round without success. The temperature is not used. Fit in float64, and on a
    few cores with ``OPENBLAS_NUM_THREADS=1``: the matrices are small, and threads that wait for
    each other are slow.

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
        guide: PairedGuide | MeanFieldGuide,
        *,
        temperature: Callable[[Any], Any] | None = annealing,
        num_restarts: int | None = None,
        plain: bool = False,
        **static_kwargs: Any,
    ) -> None:
        if not isinstance(guide, PairedGuide | MeanFieldGuide):
            raise TypeError(
                f"CAVI: guide must be a PairedGuide or a MeanFieldGuide, got "
                f"{type(guide).__name__}. Fit other guides with numpyro.infer.SVI."
            )
        if num_restarts is not None and num_restarts < 1:
            raise ValueError(f"CAVI: num_restarts must be at least 1, got {num_restarts}.")
        # the optimiser has nothing to do: a state holds the parameters themselves
        super().__init__(model, guide, _NO_OPTIMISER, TraceGraph_ELBO(), **static_kwargs)
        self.temperature = temperature
        self._num_restarts = num_restarts
        self.num_restarts = num_restarts or 1
        self.plain = plain
        self._transforms: dict[str, Any] = {}
        self._setup()

    def _setup(self) -> None:
        self.optim = _NO_OPTIMISER
        self._read = Reader(self.model, "CAVI", self.guide.block_size)
        self._read_tasks = TaskReader(self.model, "CAVI")
        self._has_functions: bool | None = None
        self._jit_params = jax.jit(self._params, static_argnames=("static",))
        self._jit_improve = jax.jit(self._improve, static_argnums=(0, 1))
        self._jit_advance = jax.jit(self._advance, static_argnames=("structure", "static"))
        self._jit_bound = jax.jit(self._bound, static_argnames=("structure", "static"))

    def __getstate__(self) -> dict[str, Any]:
        caches = (
            "optim",
            "_read",
            "_read_tasks",
            "_has_functions",
            "_jit_params",
            "_jit_improve",
            "_jit_advance",
            "_jit_bound",
        )
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # The interface of SVI

    def init(
        self, rng_key: Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> SVIState:
        """The initial state; its parameters are constrained.

        :param rng_key: random key.
        :param args: arguments of the model.
        :param init_params: values of some parameters, instead of the guide's start.
        :param kwargs: keyword arguments of the model.
        :raises ValueError: if the model does not fit, or for unknown names or other shapes in
            ``init_params``.
        """
        if self._is_multitask(args, kwargs):
            return self._init_tasks(rng_key, init_params, args, kwargs)
        args, kwargs, *_ = self._read(args, {**kwargs, **self.static_kwargs})
        rng_key, key_params = random.split(rng_key)
        if self.guide.prototype_trace is None:
            self.guide._setup_prototype(*args, **kwargs)
        params, constraint = self._jit_params(*partition((args, kwargs)), key_params)
        self._check_inner()
        self._transforms = {name: biject_to(constraint[name]) for name in params}
        self.constrain_fn = identity
        params |= _checked(init_params or {}, params)
        return SVIState((jnp.array(0), params), None, rng_key)

    def _params(self, static, dynamic, rng_key) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start values and constraints of the guide's and the model's params."""
        args, kwargs = merge(static, dynamic)
        key_guide, key_model = random.split(rng_key)
        with handlers.block():
            guide = handlers.seed(self.guide, key_guide)
            guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
            model = handlers.replay(handlers.seed(self.model, key_model), guide_trace)
            model_trace = handlers.trace(model).get_trace(*args, **kwargs)
        sites = {k: v for k, v in {**model_trace, **guide_trace}.items() if v["type"] == "param"}
        # weak types would compile every function twice
        params = {
            name: jax.lax.convert_element_type(site["value"], jnp.result_type(site["value"]))
            for name, site in sites.items()
        }
        constraint = {
            name: site["kwargs"].get("constraint", constraints.real) for name, site in sites.items()
        }
        return params, constraint

    def get_params(self, svi_state: SVIState) -> dict[str, Any]:
        """Parameters of the guide and the model.

        :param svi_state: a state.
        """
        return svi_state.optim_state[1]

    def update(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> tuple[SVIState, Any]:
        """One sweep over the pairs and one maximisation over everything else.

        :param svi_state: the current state.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: the new state and the exact negative bound at it.
        """
        if self._is_multitask(args, kwargs):
            return self._update_tasks(svi_state, args, kwargs)
        problem = self._problem(args, kwargs)
        progress = self._jit_advance(*problem, self._start(svi_state, 1), 1, -1.0)
        return self._state(svi_state, progress), progress.loss

    def stable_update(self, svi_state: SVIState, *args: Any, **kwargs: Any):
        """The same as :meth:`update`, whose closed forms cannot diverge."""
        return self.update(svi_state, *args, **kwargs)

    def evaluate(self, svi_state: SVIState, *args: Any, **kwargs: Any) -> Any:
        """The exact negative bound at a state.

        :param svi_state: a state.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        if self._is_multitask(args, kwargs):
            _, problem, state = self._tasks_point(self.get_params(svi_state), args, kwargs)
            return -_bound(problem, state)
        return -self._jit_bound(*self._problem(args, kwargs), self.get_params(svi_state))

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: SVIState | None = None,
        init_params: dict[str, Any] | None = None,
        tol: float | None = None,
        **kwargs: Any,
    ) -> CAVIRunResult:
        """Run at most ``num_steps`` steps.

        :param rng_key: random key; it matters for restarts only.
        :param num_steps: number of steps.
        :param args: arguments of the model.
        :param progress_bar: whether to show a progress bar.
        :param init_state: state to go on from.
        :param init_params: values of some parameters, instead of the guide's start.
        :param tol: stop when a step at temperature 1 changes the bound by at most ``tol`` nats.
        :param kwargs: keyword arguments of the model.
        :return: the result of the start with the best bound.
        """
        if num_steps < 1:
            raise ValueError(f"CAVI.run: num_steps must be a positive integer, got {num_steps}.")
        state = init_state
        if state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        if self._is_multitask(args, kwargs):
            given = init_state is not None or init_params is not None
            return self._run_tasks(state, num_steps, given, tol, progress_bar, args, kwargs)
        problem = self._problem(args, kwargs)
        progress = self._start(state, num_steps)
        threshold = -1.0 if tol is None else tol

        def advance(progress, stop):
            return self._jit_advance(*problem, progress, stop, threshold)

        if self.num_restarts > 1:
            progress = self._random_starts(state.rng_key, progress, *problem)
            advance = jax.vmap(advance, in_axes=(0, None))
        concrete = are_concrete((problem[2:], progress))
        chunk = max(num_steps // 20, 1) if progress_bar and concrete else num_steps
        with tqdm(total=num_steps, disable=not (progress_bar and concrete)) as bar:
            for done in range(0, num_steps, chunk):
                stop = min(done + chunk, num_steps)
                progress = advance(progress, stop)
                bar.update(stop - done)
                if bar.disable:
                    continue
                bar.set_postfix_str(f"bound: {-float(jnp.min(progress.loss)):.4f}", refresh=False)
                if bool(jnp.all(progress.converged)):
                    break
        if self.num_restarts > 1:
            # a start that went wrong must not win
            best = jnp.argmin(jnp.where(jnp.isnan(progress.loss), jnp.inf, progress.loss))
            progress = jax.tree.map(lambda x: x[best], progress)
        losses = progress.losses
        if not_jax_tracer(progress.step):
            losses = losses[: int(progress.step - progress.first)]
            self._check_end(int(progress.step), float(progress.loss))
        else:
            losses = jnp.where(jnp.isnan(losses), progress.loss, losses)
        converged = None if tol is None else progress.converged
        return CAVIRunResult(progress.params, self._state(state, progress), losses, converged)

    # Models with latent functions

    def _is_multitask(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if self._has_functions is None:
            if self.guide.prototype_trace is not None:
                self._has_functions = bool(self.guide.functions)
            else:
                args, kwargs = on_device((args, {**kwargs, **self.static_kwargs}))
                trace = checked_trace(self.model, args, kwargs, "CAVI")
                self._has_functions = bool(find_functions(trace))
        return self._has_functions

    def _tasks(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        kwargs = {**kwargs, **self.static_kwargs}
        self.guide.remember((args, kwargs))
        return self._read_tasks(args, kwargs)

    def _init_tasks(self, rng_key, init_params, args, kwargs) -> SVIState:
        kwargs = {**kwargs, **self.static_kwargs}
        tasks = self._read_tasks(args, kwargs)
        rng_key, key_params, key_start = random.split(rng_key, 3)
        if self.guide.prototype_trace is None:
            self.guide._setup_prototype(*args, **kwargs)
        # so that the guide reads nothing twice
        self.guide._task_reader = self._read_tasks
        self.guide.remember((args, kwargs))
        self._check_inner()
        params, constraint = self._jit_params(*partition((args, kwargs)), key_params)
        self._transforms = {name: biject_to(constraint[name]) for name in params}
        self.constrain_fn = identity
        params |= _checked(init_params or {}, params)
        problem, _ = tasks.hold(self.model, (args, kwargs), params, self.guide.prefix)
        theta = tasks.pack(params, self.guide.prefix, problem).theta
        improve = self._improvement(tasks, args, kwargs)
        if improve is not None and not init_params:
            # or else the functions explain what the other sites should
            alone = multitask.start_alone(problem, theta)
            for _ in range(NUM_IMPROVEMENTS):
                problem, alone, _ = improve(problem, alone)
            params |= {self._name(site, params): x for site, x in problem.held.items()}
        state = multitask.start_random(key_start, problem, theta)
        params |= tasks.unpack(state, params, self.guide.prefix)
        params |= _checked(init_params or {}, params)
        return SVIState((jnp.array(0), params), None, rng_key)

    def _improve(self, form, static, dynamic, problem, state):
        """A few L-BFGS steps of the other sites up the exact bound."""

        def at(held):
            moved, _ = problem_at(self.model, merge(static, dynamic), form, problem, held)
            return moved, multitask.hold_fixed(moved, state)

        transforms = {x: self._transforms[self._name(x, self._transforms)] for x in form.others}
        held, loss = climb(lambda held: multitask.bound(*at(held)), problem.held, transforms)
        return *at(held), -loss

    def _improvement(self, tasks, args, kwargs) -> multitask.Improve | None:
        form = tasks.form
        if not form.others:
            return None
        static, dynamic = partition((args, {**kwargs, **self.static_kwargs}))
        return partial(self._jit_improve, form, static, dynamic)

    def _tasks_point(self, params, args, kwargs):
        """What a step needs: the reading, the problem and the state."""
        tasks = self._tasks(args, kwargs)
        call = (args, {**kwargs, **self.static_kwargs})
        problem, _ = tasks.hold(self.model, call, params, self.guide.prefix)
        return tasks, problem, tasks.pack(params, self.guide.prefix, problem)

    def _unpack_tasks(self, tasks, problem, state, params) -> dict[str, Any]:
        held = {self._name(site, params): x for site, x in dict(problem.held).items()}
        return params | held | tasks.unpack(state, params, self.guide.prefix)

    def _update_tasks(self, svi_state, args, kwargs):
        step, params = svi_state.optim_state
        tasks, problem, state = self._tasks_point(params, args, kwargs)
        improve = self._improvement(tasks, args, kwargs)
        (stage,) = steps(tasks, problem, state, 1, self.plain, improve)
        params = self._unpack_tasks(tasks, stage.problem, stage.state, params)
        key = random.split(svi_state.rng_key)[0]
        return SVIState((step + 1, params), None, key), -stage.bounds[-1]

    def _run_tasks(self, svi_state, num_steps, given, tol, progress_bar, args, kwargs):
        step, params = svi_state.optim_state
        tasks, problem, first = self._tasks_point(params, args, kwargs)
        improve = self._improvement(tasks, args, kwargs)
        number = self._num_restarts or (1 if given or self.plain else 2)
        found, converged = [], False
        with tqdm(total=number * num_steps, disable=not progress_bar) as bar:
            climbs = [
                _watched(steps(tasks, problem, state, num_steps, self.plain, improve), bar)
                for state in starts(tasks, svi_state.rng_key, problem, first, number)
            ]
            for stage in multitask.best_of(climbs):
                found.append(-stage.bounds)
                gains = jnp.abs(jnp.diff(stage.bounds))
                if tol is not None and stage.last and bool(jnp.any(gains <= tol)):
                    converged = True
                    break
        losses = jnp.concatenate(found)
        self._check_end(0, float(losses[-1]))
        params = self._unpack_tasks(tasks, stage.problem, stage.state, params)
        key = random.split(svi_state.rng_key)[0]
        svi_state = SVIState((step + losses.size, params), None, key)
        flag = None if tol is None else jnp.array(converged)
        return CAVIRunResult(params, svi_state, losses, flag)

    # One step

    def _advance(
        self,
        structure: Structure,
        static: Any,
        data: Data,
        progress: _Progress,
        stop: Any,
        threshold: Any,
    ) -> _Progress:
        """Steps until ``stop`` of them are done or the bound has settled."""
        call = merge(static, data.arguments)
        residual = self._residual(structure, data, progress.params)

        def settled(loss, previous, temperature):
            return (temperature <= 1.0) & (jnp.abs(previous - loss) <= threshold)

        def step(carry):
            progress, residual = carry
            temperature = 1.0 if self.temperature is None else self.temperature(progress.step)
            params, bound, residual = self._step(
                structure, call, data, progress.params, residual, temperature
            )
            loss = -bound
            progress = _Progress(
                progress.first,
                progress.step + 1,
                params,
                loss,
                settled(loss, progress.loss, temperature),
                progress.losses.at[progress.step - progress.first].set(loss),
            )
            return progress, residual

        def unfinished(carry):
            progress, _ = carry
            return (progress.step - progress.first < stop) & ~progress.converged

        return jax.lax.while_loop(unfinished, step, (progress, residual))[0]

    def _step(self, structure, call, data, params, residual, temperature):
        args, kwargs = call
        posterior = self.guide.pack(structure, params)
        at: Any = data.at
        design = data.design
        if at is None:
            latents = self._latents(structure, params)
            at = evaluate(structure, self.model, args, kwargs, latents, posterior.mean)
            residual = at.residual
            if design is None:
                design = self._read.design(structure, args, kwargs, latents)
        posterior, residual = posterior.sweep(design, residual, at.precision, at.prior, temperature)
        params = params | self.guide.unpack(structure, posterior)
        if structure.others:
            # the next sweep finds another residual, so this one is not handed on
            return *self._maximise(structure, call, data, params, posterior), None
        squares = jnp.sum(residual**2) + posterior.predictor_variance(design)
        bound = expected_log_density(at, squares) - posterior.divergence(at.prior)
        return params, bound, residual

    def _maximise(self, structure, call, data, params, posterior):
        """The M-step: closed forms where they exist, for the rest a few L-BFGS steps."""
        args, kwargs = call
        names = {site: self._name(site, params) for site in structure.others}
        pairs = self.guide.unpack(structure, posterior)

        def bound(params):
            return self._bound_at(structure, call, data.design, params, posterior)

        if structure.roles:
            latents = self._latents(structure, params)
            trace = trace_at(self.model, args, kwargs, latents)
            at = evaluate(structure, self.model, args, kwargs, latents, posterior.mean)
            squares = self._squares(structure, call, data.design, latents, at, posterior)
            for role in structure.roles:
                site, index = trace[role.site], data.indices[role.site]
                value = maximum(role, site, at, squares, posterior, index)
                params = params | {names[role.site]: value}
        known = set(pairs) | {names[role.site] for role in structure.roles}
        free = {name: x for name, x in params.items() if name not in known}
        if not free:
            return params, bound(params)
        fixed = {name: x for name, x in params.items() if name not in free}
        transforms = {name: self._transforms[name] for name in free}
        free, loss = climb(lambda free: bound(fixed | free), free, transforms)
        return fixed | free, -loss

    def _bound(self, structure, static, data, params) -> Any:
        posterior = self.guide.pack(structure, params)
        call = merge(static, data.arguments)
        return self._bound_at(structure, call, data.design, params, posterior)

    def _bound_at(self, structure, call, design, params, posterior) -> Any:
        """The exact evidence lower bound (supplement, eq. 2)."""
        args, kwargs = call
        latents = self._latents(structure, params)
        at = evaluate(structure, self.model, args, kwargs, latents, posterior.mean)
        squares = self._squares(structure, call, design, latents, at, posterior)
        return expected_log_density(at, squares) - posterior.divergence(at.prior)

    def _squares(self, structure, call, design, latents, at, posterior) -> Any:
        """Expected sum of squared whitened residuals."""
        args, kwargs = call
        if design is None:
            design = self._read.design(structure, args, kwargs, latents)
        return jnp.sum(at.residual**2) + posterior.predictor_variance(design)

    def _residual(self, structure, data, params) -> Any:
        """Whitened residual; `None` where it depends on other sites and no sweep can hand it on."""
        if data.at is None:
            return None
        return data.at.residual - predictor(data.design, self.guide.pack(structure, params).mean)

    def _name(self, site: str, params: dict[str, Any]) -> str:
        return param_name(site, self.guide.prefix, params)

    def _latents(self, structure: Structure, params: dict[str, Any]) -> dict[str, Any]:
        """Values of the other latent sites and the model's params."""
        return {site: params[self._name(site, params)] for site in structure.others}

    # The data of a run

    def _problem(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Structure, arguments in compilable form, and what depends on data alone."""
        kwargs = {**kwargs, **self.static_kwargs}
        reading = self._read(args, kwargs)
        structure = reading.structure
        static, dynamic = partition((reading.args, reading.kwargs))
        at = None if structure.others else reading.at
        return structure, static, Data(dynamic, reading.design, at, reading.indices)

    def _start(self, state: SVIState, num_steps: int) -> _Progress:
        step, params = state.optim_state
        dtype = jnp.result_type(float)
        losses = jnp.full(num_steps, jnp.nan, dtype)
        return _Progress(step, step, params, jnp.array(jnp.inf, dtype), jnp.array(False), losses)

    def _random_starts(self, key, progress, structure, static, data) -> _Progress:
        at: Any = data.at
        if at is None:
            latents = self._latents(structure, progress.params)
            weights = self.guide.pack(structure, progress.params).mean
            args, kwargs = merge(static, data.arguments)
            at = evaluate(structure, self.model, args, kwargs, latents, weights)
        scale = jnp.sqrt(at.prior.variance)

        def start(key):
            key_probs, key_loc = random.split(key)
            posterior = self.guide.pack(structure, progress.params)._replace(
                probs=random.uniform(key_probs, scale.shape, scale.dtype),
                loc=scale * random.normal(key_loc, scale.shape, scale.dtype),
            )
            return progress.params | self.guide.unpack(structure, posterior)

        others = jax.vmap(start)(random.split(key, self.num_restarts - 1))
        progress = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.num_restarts, *x.shape)), progress
        )
        params = jax.tree.map(lambda x, y: x.at[1:].set(y), progress.params, others)
        return progress._replace(params=params)

    def _state(self, state: SVIState, progress: _Progress) -> SVIState:
        rng_key = random.split(state.rng_key)[0]
        return SVIState((progress.step, progress.params), None, rng_key)

    def _check_end(self, step: int, loss: float) -> None:
        if loss != loss:
            raise FloatingPointError(
                f"CAVI.run: the bound is not a number after step {step}. A noise scale without a "
                "prior may have collapsed to zero: give it one, or rescale the data."
            )
        if self.temperature is None or self._has_functions:
            return
        if self.temperature(step - 1) > 1.0:
            warnings.warn(
                f"CAVI.run ended after step {step} at temperature "
                f"{float(self.temperature(step - 1)):.3g}, where inclusion probabilities are still "
                "flattened. Run more steps, or pass `temperature=None` to CAVI.",
                stacklevel=3,
            )

    def _check_inner(self) -> None:
        if self.guide.inner is not None and not isinstance(self.guide.inner, AutoDelta):
            raise ValueError(
                f"CAVI: the guide's inner guide is {type(self.guide.inner).__name__}, whose bound "
                "has no closed form. Use AutoDelta, or fit with numpyro.infer.SVI."
            )


_bound = jax.jit(multitask.bound)


def _watched(climb: Iterator[multitask.Stage], bar: tqdm) -> Iterator[multitask.Stage]:
    for stage in climb:
        bar.update(stage.bounds.size)
        bar.set_postfix_str(f"bound: {float(stage.bounds[-1]):.4f}", refresh=False)
        yield stage


def expected_log_density(at: Likelihood, squares: Any) -> Any:
    """``<log p(y | w)>`` and the log density of the other sites.

    :param squares: expected sum of squared whitened residuals.
    """
    log_scale = jnp.log(at.scale) + 0.5 * jnp.log(2.0 * jnp.pi)
    return at.log_density - jnp.sum(at.weight * log_scale) - 0.5 * at.precision * squares


def _checked(init_params: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(init_params) - set(params))
    if unknown:
        raise ValueError(
            f"CAVI: init_params has unknown names {unknown}; the parameters are {sorted(params)}."
        )
    for name, value in init_params.items():
        if jnp.shape(value) != params[name].shape:
            raise ValueError(
                f"CAVI: init_params[{name!r}] has shape {jnp.shape(value)}, expected "
                f"{params[name].shape}."
            )
    return {name: jnp.asarray(x, params[name].dtype) for name, x in init_params.items()}
