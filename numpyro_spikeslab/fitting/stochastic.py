# SPDX-License-Identifier: Apache-2.0
r"""Stochastic coordinate ascent: steps on batches of tasks that share latent functions.

Weights, and other sites with entries for each task, are local; functions, their kernels and the
sites that tasks share are global (Hoffman, Blei, Wang and Paisley, 2013). A batch of B of Q tasks
gives each function the terms :math:`\hat\alpha_m, \hat h_m`; Q/B times these are an unbiased
estimate of the terms of all tasks. A natural gradient step of length :math:`\rho_t` averages it
with the current terms,

.. math::

    \alpha_m \leftarrow (1 - \rho_t)\, \alpha_m + \rho_t \tfrac{Q}{B} \hat\alpha_m, \qquad
    h_m \leftarrow (1 - \rho_t)\, h_m + \rho_t \tfrac{Q}{B} \hat h_m ,

and with :math:`\rho_t = 1` and all tasks it is the sweep of the paper. Counts and sums of shared
sites are averaged likewise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation, PairedMeanField
from numpyro_spikeslab.fitting.function_sweeps import sweep_plain
from numpyro_spikeslab.fitting.function_updates import Terms, condition, update_plain
from numpyro_spikeslab.fitting.posterior import Batches, Engine, Posterior, strong
from numpyro_spikeslab.fitting.run import Call
from numpyro_spikeslab.fitting.schedules import check_schedule, forgetting
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.roles import Tally
from numpyro_spikeslab.support.messages import bad

# Passes over the weights of a batch before its functions are visited; one more follows.
LOCAL_PASSES = 10

Rate = tuple[Any, Any]
"""The learning rate, 0 to leave all that tasks share, and Q/B, all tasks per task of a batch."""


class Stream(NamedTuple):
    """Steps on batches of tasks.

    - **num_tasks** - Q, of all batches together.
    - **learning_rate** - maps a step to its rate.
    """

    num_tasks: int
    learning_rate: Callable[[Any], Any]

    def start(self, call: Call, step: Any, posterior: Posterior) -> tuple[Any, Posterior]:
        """Return step and posterior of a state; the tasks of an ordinary fit stand for all."""
        if posterior.batches is not None:
            return step, posterior
        local, number = self.check(call), len(posterior.weights.probs)
        if number > self.num_tasks:
            got = f"{self.num_tasks} and a fit of {number} tasks"
            raise bad("CAVI: num_tasks", got, "the number of all tasks")
        per_fit, per_batch = (self.num_tasks / n for n in (number, call.engine.form.num_tasks))
        fit = jnp.mean(posterior.weights.probs, axis=0), per_fit, per_batch
        posterior = _resized(call, local, posterior)
        posterior, tallies = _start(call.engine, local, posterior, fit)
        zero, before = strong((jnp.zeros((), int), step))
        return zero, posterior._replace(batches=Batches(tallies, before))

    def step(self, call: Call, state: tuple[Any, Posterior], rho: Any = None) -> Any:
        """Take one step on a batch, by default at the learning rate of the step."""
        step, posterior = self.start(call, *state)
        engine, local = call.engine, self.check(call)
        if rho is None and are_concrete(step):
            rho = float(self.learning_rate(int(step)))
            if not 0 <= rho <= 1:
                what, remedy = "CAVI: learning_rate", "A usual one is (10.0 + step) ** -0.7."
                raise bad(what, f"{rho} at step {step}", "a rate in [0, 1]", remedy)
        elif rho is None:
            rho = jnp.clip(self.learning_rate(step), 0, 1)
        rate = rho, self.num_tasks / engine.form.num_tasks
        return advance(engine, local, step, _resized(call, local, posterior), rate)

    def check(self, call: Call) -> tuple[str, ...]:
        """Return the names of local sites, or raise if there are no steps on this batch."""
        form, what = call.engine.form, "CAVI: num_tasks"
        if form.functions is None or form.sparse:
            known = "entries of a table" if form.sparse else "known features"
            got = f"{form.response!r} with {known}"
            remedy = "Leave it out, or write `W @ phi` of a whole table, NaN where entries miss."
            raise bad(what, got, "tasks that share latent functions", remedy)
        if form.free:
            got, expected = f"a model with the sites {list(form.free)}", "only sites with a role"
            remedy = "Take them out, or condition on them with `numpyro.handlers.condition`."
            raise bad(what, got, expected, remedy)
        if not 2 <= form.num_tasks <= self.num_tasks:
            got, expected = f"a batch of {form.num_tasks} tasks", f"2 to num_tasks={self.num_tasks}"
            raise bad(what, got, expected, "num_tasks is the number of all tasks, not of a batch.")
        # such as the noise scale of each task
        sites, indices = (role.site for role in form.roles_with_mode), call.reading.indices
        return tuple(site for site in sites if indices[site].is_local(form.num_tasks))


def stream_of(num_tasks: Any, learning_rate: Any) -> Stream | None:
    """Check the arguments of a fit; `None` if all tasks are there."""
    if num_tasks is None and learning_rate is None:
        return None
    if not isinstance(num_tasks, int | np.integer) or num_tasks < 2:
        remedy = "Without batches leave it and learning_rate out."
        expected = "the number of all tasks, an integer of at least 2"
        raise bad("CAVI: num_tasks", num_tasks, expected, remedy)
    check_schedule("learning_rate", learning_rate)
    return Stream(int(num_tasks), learning_rate or forgetting)


def _resized(call: Call, local: tuple[str, ...], posterior: Posterior) -> Posterior:
    """Reset the weights, and set local sites to their mean, for the tasks of another batch."""
    form, functions = call.engine.form, posterior.functions
    shape, before = (form.num_features, form.num_obs), functions.mean.shape
    if before != shape:
        remedy = "All batches must have the same points; begin anew with `init` for others."
        expected = f"functions {shape}, as the batch has"
        raise bad("CAVI: the state", f"functions {before}", expected, remedy)
    values = dict(posterior.values)
    for site, value in values.items():
        like = call.reading.generic[site]
        if site in local:
            values[site] = jnp.full(jnp.shape(like), jnp.mean(value), like.dtype)
        elif np.shape(value) != np.shape(like):
            expected = f"{np.shape(value)} as in the state"
            remedy = "A site must have entries for each task, or the same in all batches."
            raise bad(f"CAVI: {site!r} of a batch", f"shape {np.shape(like)}", expected, remedy)
    prior: Any = call.reading.functions
    if prior.fixed:
        # parameters that the model holds may differ between batches
        functions = functions._replace(theta=prior.theta(values))
    weights = PairedMeanField(*jnp.zeros((3, *form.shape), functions.mean.dtype))
    return posterior._replace(weights=weights, functions=functions, values=values)


@partial(jax.jit, static_argnums=1)
def _start(
    engine: Engine, local: tuple[str, ...], posterior: Posterior, fit: tuple[Any, Any, Any]
) -> tuple[Posterior, dict[str, Tally]]:
    """Scale the terms of functions and the tallies of a fit of some tasks to all tasks.

    Counts are from the batch, and sums follow from the values of the sites.
    """
    probs, per_fit, per_batch = fit
    at = engine.view(posterior)
    prior = engine.function_prior(at)

    def visit(m, posterior):
        functions = posterior.functions
        terms = Terms(m, per_fit * functions.alpha[m], per_fit * functions.h[m])
        return condition(prior, posterior, terms, functions.theta[m], functions.step[m])

    posterior = jax.lax.fori_loop(0, engine.form.num_features, visit, strong(posterior))
    weights = posterior.weights
    alike = weights._replace(probs=probs * jnp.ones_like(weights.probs))
    of_batch, tallies = engine.tallies(at, alike, jnp.zeros_like(at.sigma2)), {}
    for role in engine.form.roles_with_mode:
        if role.site not in local:
            count = per_batch * of_batch[role.site].count
            tallies[role.site] = Tally(count, count * role.expected(posterior.values[role.site]))
    return strong((engine.modes(at, posterior, tallies), tallies))


@partial(jax.jit, static_argnums=1)
def advance(
    engine: Engine, local: tuple[str, ...], step: Any, posterior: Posterior, rate: Rate
) -> tuple[Any, Posterior, Float[Array, ""]]:
    """Update weights of a batch, from zero, functions, weights again, and sites with a role."""
    step, posterior, rate = strong((step, posterior, rate))
    assert posterior.batches is not None
    tallies, before = posterior.batches
    temperature = 1.0 if engine.temperature is None else engine.temperature(before + step)
    posterior = _settled(engine, local, posterior, temperature)
    at = engine.view(posterior)
    update = partial(_update_blended, engine.function_prior(at), rate)
    posterior, squares = sweep_plain(engine, at, posterior, temperature, update)
    posterior = engine.with_kernels(posterior)
    of_batch = engine.tallies(at, posterior.weights, squares)
    shared = jax.tree.map(partial(_blend, rate), tallies, {x: of_batch[x] for x in tallies})
    values = engine.modes(at, posterior, of_batch | shared).values
    values = engine.freeze_shaping(temperature, posterior.values, values)
    posterior = posterior._replace(values=values, batches=Batches(shared, before))
    at = engine.view(posterior)
    if not engine.form.likelihood.is_fixed:
        # the squares belong to the old stand-in
        squares = engine.features.squares(engine, at, posterior)
    # as if all tasks were like this batch
    of_all = at.log_density + engine.log_prior(at, values, local)
    of_all -= jnp.sum(posterior.functions.kl)
    loss = -(of_all + rate[1] * (engine.bound_given(at, posterior, squares) - of_all))
    return *strong((step + 1, posterior)), loss


def _blend(rate: Rate, current: Any, of_batch: Any) -> Any:
    """Average a sum over all tasks with the one of a batch: a natural gradient step."""
    rho, share = rate
    return (1 - rho) * current + rho * share * of_batch


def _update_blended(prior: Any, rate: Rate, posterior: Posterior, terms: Terms) -> Posterior:
    """Take the update of the paper with terms averaged over batches."""
    functions, m = posterior.functions, terms.m
    alpha = _blend(rate, functions.alpha[m], terms.alpha)
    h = _blend(rate, functions.h[m], terms.h)
    # at rate 0 the search over kernels rests, too
    due = jnp.where(rate[0] > 0, functions.step, 0)
    start = posterior._replace(functions=functions._replace(step=due))
    new = update_plain(prior, start, Terms(m, alpha, h)).functions
    step = jnp.where(rate[0] > 0, new.step, functions.step)
    return posterior._replace(functions=new._replace(step=step))


def _settled(
    engine: Engine, local: tuple[str, ...], posterior: Posterior, temperature: Any
) -> Posterior:
    """Make some passes over the weights of a batch and its local sites."""
    functions = posterior.functions
    moments = functions.mean, functions.var
    sums, update = None, Expectation(temperature)
    if engine.form.likelihood.is_fixed and engine.form.keeps_products:
        sums = engine.view(posterior).sums(*moments)

    def one(_, posterior):
        # with another stand-in in each pass
        at = engine.view(posterior)
        weights, squares = at.sweep(moments, posterior.weights, update, sums)
        tallies = engine.tallies(at, weights, squares)
        values = engine.modes(at, posterior, {site: tallies[site] for site in local}).values
        values = engine.freeze_shaping(temperature, posterior.values, values)
        return strong(posterior._replace(weights=weights, values=values))

    return jax.lax.fori_loop(0, LOCAL_PASSES, one, strong(posterior))
