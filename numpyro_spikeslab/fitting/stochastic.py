# SPDX-License-Identifier: Apache-2.0
r"""Stochastic coordinate ascent: steps on batches of tasks that share latent functions.

Weights, and what else belongs to a task, are local; functions, their kernels and the sites that
tasks share are global (Hoffman, Blei, Wang and Paisley, 2013). A batch of B of Q tasks gives each
function the terms :math:`\hat\alpha_m, \hat h_m`, so Q/B times these are an unbiased estimate of
what all tasks say. A natural gradient step of length :math:`\rho_t` averages it with what is known,

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

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.fitting.function_sweeps import sweep_plain
from numpyro_spikeslab.fitting.function_updates import Terms, condition, update_plain, with_kernels
from numpyro_spikeslab.fitting.m_step import modes_of, tallies_of
from numpyro_spikeslab.fitting.posterior import (
    Batches,
    Data,
    Posterior,
    Spec,
    bound_given,
    function_prior,
    log_prior,
    strong,
    view_at,
    with_roles,
)
from numpyro_spikeslab.fitting.run import Call
from numpyro_spikeslab.fitting.schedules import forgetting
from numpyro_spikeslab.fitting.tasks import gram, keeps_products, sweep_weights
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reading.form import FUNCTIONS
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import Tally

LOCAL_PASSES = 10
"""Over the weights of a batch before its functions are visited; one more follows."""


class Stream(NamedTuple):
    """Arguments of steps on batches.

    - **num_tasks** - Q, of all batches together.
    - **learning_rate** - maps a step to its rate.
    """

    num_tasks: int
    learning_rate: Callable[[Any], Any]

    def start(self, call: Call, step: Any, posterior: Posterior) -> tuple[Any, Posterior]:
        """Step and posterior of a state; the tasks of an ordinary fit stand for all.

        :param step: number of steps of the fit.
        """
        if posterior.batches is not None:
            return step, posterior
        local = self.check(call)
        number = len(posterior.weights.probs)
        if number > self.num_tasks:
            raise bad(
                "CAVI: num_tasks",
                f"{self.num_tasks} and a fit of {number} tasks",
                "the number of all tasks",
            )
        shares = Shares(*(self.num_tasks / n for n in (number, call.spec.form.num_tasks)))
        probs = jnp.mean(posterior.weights.probs, axis=0)
        resized = _resized(call, local, posterior)
        begun, tallies = _start(call.spec, local, call.data, resized, probs, shares)
        zero, before = strong((jnp.zeros((), int), step))
        return zero, begun._replace(batches=Batches(tallies, before))

    def update(self, call: Call, step: Any, posterior: Posterior) -> tuple[Any, Posterior, Any]:
        """One step on a batch.

        :return: the next step, the posterior, and the negative bound, estimated for all tasks.
        """
        return self._step(call, step, posterior, self._rho(step))

    def evaluate(self, call: Call, step: Any, posterior: Posterior) -> Any:
        """The negative bound, estimated for all tasks from the weights of a batch."""
        return self._step(call, step, posterior, 0.0)[2]

    def _step(self, call: Call, step: Any, posterior: Posterior, rho: Any) -> Any:
        spec, local = call.spec, self.check(call)
        resized = _resized(call, local, posterior)
        rate = Rate(rho, self.num_tasks / spec.form.num_tasks)
        return advance(spec, local, call.data, step, resized, rate)

    def _rho(self, step: Any) -> Any:
        """The learning rate of a step.

        :raises ValueError: if it is outside [0, 1]; within a transformation, which cannot say so,
            it is cut there.
        """
        if not are_concrete(step):
            return jnp.clip(self.learning_rate(step), 0, 1)
        rho = float(self.learning_rate(int(step)))
        if not 0 <= rho <= 1:
            raise ValueError(
                f"CAVI: learning_rate must be in [0, 1], got {rho} at step {step}. A usual one is "
                "`lambda step: (10.0 + step) ** -0.7`."
            )
        return rho

    def check(self, call: Call) -> tuple[str, ...]:
        """Names of the sites that are local.

        :raises ValueError: if there can be no stochastic steps on this batch.
        """
        form = call.spec.form
        if form.kind != FUNCTIONS:
            raise ValueError(
                f"CAVI: num_tasks asks for steps on batches of tasks that share latent functions, "
                f"but the features of {form.likelihood!r} are of the kind {form.kind!r}. Leave it "
                "out, or write the location as `W @ phi` of a whole table, with NaN where entries "
                "are missing."
            )
        if form.free:
            raise ValueError(
                f"CAVI: num_tasks allows as other sites noise scales, inclusion probabilities and "
                f"slab scales with their usual priors, but the model has {list(form.free)}. Take "
                "them out, or condition on their values with `numpyro.handlers.condition`."
            )
        if not 2 <= form.num_tasks <= self.num_tasks:
            raise ValueError(
                f"CAVI: a batch must have between 2 and num_tasks={self.num_tasks} tasks, got "
                f"{form.num_tasks}. num_tasks is the number of all tasks, not of a batch."
            )
        return local_sites(call.reading)


def stream_of(num_tasks: Any, learning_rate: Any) -> Stream | None:
    """What the arguments of a fit ask for; `None` where all tasks are there.

    :raises ValueError: if they do not fit each other.
    """
    if num_tasks is None:
        if learning_rate is not None:
            raise ValueError(
                "CAVI: learning_rate is of steps on batches of tasks, so it needs num_tasks, the "
                "number of all tasks, which was not given. Give it, or leave learning_rate out."
            )
        return None
    if not isinstance(num_tasks, int | np.integer) or num_tasks < 2:
        raise ValueError(
            f"CAVI: num_tasks must be the number of all tasks, an integer of at least 2, got "
            f"{num_tasks!r}."
        )
    if learning_rate is not None and not callable(learning_rate):
        raise ValueError(
            f"CAVI: learning_rate must map a step to a rate, got {learning_rate!r}. For a constant "
            f"one write `lambda step: {learning_rate!r}`."
        )
    return Stream(int(num_tasks), learning_rate or forgetting)


def local_sites(reading: Reading) -> tuple[str, ...]:
    """Sites of which each task has entries of its own, such as a noise scale of each."""
    form = reading.form
    roles = (role.site for role in form.roles_with_mode)
    return tuple(site for site in roles if reading.indices[site].is_local(form.num_tasks))


def _resized(call: Call, local: tuple[str, ...], posterior: Posterior) -> Posterior:
    """Without weights, and with local sites of the batch, at the mean of those that were there:
    nothing is known of new tasks."""
    form, values = call.spec.form, dict(posterior.values)
    functions = posterior.functions
    if functions is None or functions.mean.shape != (form.num_features, form.num_obs):
        there = "none" if functions is None else f"functions of the shape {functions.mean.shape}"
        raise ValueError(
            f"CAVI: a batch has {form.num_features} functions at {form.num_obs} points, and the "
            f"state has {there}. All batches must have the same points; begin anew with `init` "
            "for others."
        )
    for site, value in values.items():
        like = call.reading.generic[site]
        if site in local:
            values[site] = jnp.full(jnp.shape(like), jnp.mean(value), like.dtype)
        elif np.shape(value) != np.shape(like):
            raise ValueError(
                f"CAVI: {site!r} has shape {np.shape(like)} in a batch and {np.shape(value)} in "
                "the state. A site must have entries for each task, or the same in all batches."
            )
    known = call.reading.functions
    if known is not None and known.fixed:
        # parameters that the model holds may be others than before
        functions = functions._replace(theta=known.theta(values))
    nothing = jnp.zeros(form.shape, functions.mean.dtype)
    weights = PairedMeanField(nothing, nothing, nothing)
    return posterior._replace(weights=weights, functions=functions, values=values)


def _shared(local: tuple[str, ...], tallies: dict[str, Tally]) -> dict[str, Tally]:
    return {site: found for site, found in tallies.items() if site not in local}


class Rate(NamedTuple):
    """
    - **rho** - the learning rate; 0 leaves all that tasks share as it is.
    - **share** - Q/B, number of all tasks to one of the batch.
    """

    rho: Any
    share: Any


class Shares(NamedTuple):
    """Number of all tasks to one of the fit that steps begin at, and to one of a batch."""

    start: Any
    batch: Any


@partial(jax.jit, static_argnums=(0, 1))
def _start(
    spec: Spec, local: tuple[str, ...], data: Data, posterior: Posterior, probs: Any, shares: Shares
) -> tuple[Posterior, dict[str, Tally]]:
    """What a fit has told, as if all tasks were like those that it had.

    These are not at hand: counts are of the batch, and sums follow from the values of the sites.

    :param probs: mean inclusion probability of each function in that fit.
    """
    at = view_at(spec, data, posterior)
    prior = function_prior(spec, data, at)

    def visit(m, posterior):
        functions: Any = posterior.functions
        terms = Terms(m, shares.start * functions.alpha[m], shares.start * functions.h[m])
        return condition(prior, posterior, terms, functions.theta[m], functions.step[m])

    posterior = jax.lax.fori_loop(0, spec.form.num_features, visit, strong(posterior))
    paired: Any = posterior.weights
    alike = paired._replace(probs=probs * jnp.ones_like(paired.probs))
    found, tallies = tallies_of(spec, data, at, alike, jnp.zeros_like(at.sigma2)), {}
    for role in spec.form.roles_with_mode:
        count = shares.batch * found[role.site].count
        total = count * role.expected(posterior.values[role.site])
        tallies[role.site] = Tally(count, total)
    tallies = _shared(local, tallies)
    values = modes_of(spec, at, posterior.values, tallies)
    return strong((posterior._replace(values=values), tallies))


@partial(jax.jit, static_argnums=(0, 1))
def advance(
    spec: Spec, local: tuple[str, ...], data: Data, step: Any, posterior: Posterior, rate: Rate
) -> tuple[Any, Posterior, Float[Array, ""]]:
    """One step on a batch: its weights, then the functions in turn and the weights once more, then
    the sites with a role.

    :param local: names of the sites that are local.
    :param posterior: without weights.
    :return: the next step, the posterior, and the negative bound, estimated for all tasks.
    """
    step, posterior, rate = strong((step, posterior, rate))
    tallies, before = posterior.batches
    temperature = 1.0 if spec.temperature is None else spec.temperature(before + step)
    base = view_at(spec, data, posterior)
    posterior = _settled(spec, local, data, base, posterior, temperature)
    at = with_roles(spec, data, base, posterior.values)
    update = partial(_update_blended, function_prior(spec, data, at), rate)
    posterior, squares = sweep_plain(spec, data, at, posterior, temperature, update)
    posterior = with_kernels(spec, posterior)
    found = tallies_of(spec, data, at, posterior.weights, squares)
    shared = jax.tree.map(partial(_blend, rate), tallies, _shared(local, found))
    values = modes_of(spec, at, posterior.values, found | shared)
    posterior = posterior._replace(values=values, batches=Batches(shared, before))
    at = with_roles(spec, data, at, values)
    loss = -_estimate(spec, local, at, posterior, squares, rate)
    return *strong((step + 1, posterior)), loss


def _blend(rate: Rate, known: Any, batch: Any) -> Any:
    """The natural gradient step of something that adds up over tasks."""
    return (1 - rate.rho) * known + rate.rho * rate.share * batch


def _update_blended(prior: Any, rate: Rate, posterior: Posterior, terms: Terms) -> Posterior:
    """The update of the paper from terms that are blended with what is known."""
    functions, m = posterior.functions, terms.m
    assert functions is not None
    alpha = _blend(rate, functions.alpha[m], terms.alpha)
    h = _blend(rate, functions.h[m], terms.h)
    # without news kernels stay, too
    due = jnp.where(rate.rho > 0, functions.step, 0)
    held = posterior._replace(functions=functions._replace(step=due))
    found: Any = update_plain(prior, held, Terms(m, alpha, h)).functions
    step = jnp.where(rate.rho > 0, found.step, functions.step)
    return posterior._replace(functions=found._replace(step=step))


def _settled(
    spec: Spec,
    local: tuple[str, ...],
    data: Data,
    at: View,
    posterior: Posterior,
    temperature: Any,
) -> Posterior:
    """A few passes over the weights of a batch, and over its local sites."""
    functions: Any = posterior.functions
    given = functions.mean, functions.var
    stats = gram(at, *given) if keeps_products(spec.form) else None

    def one(_, posterior):
        own = with_roles(spec, data, at, posterior.values)
        weights, squares = sweep_weights(own, *given, stats, posterior.weights, temperature)
        posterior = posterior._replace(weights=weights)
        found = tallies_of(spec, data, own, weights, squares)
        values = modes_of(spec, own, posterior.values, {site: found[site] for site in local})
        return strong(posterior._replace(values=values))

    return jax.lax.fori_loop(0, LOCAL_PASSES, one, strong(posterior))


def _estimate(
    spec: Spec, local: tuple[str, ...], at: View, posterior: Posterior, squares: Any, rate: Rate
) -> Float[Array, ""]:
    """The bound of all tasks, as if all were like those of the batch."""
    functions: Any = posterior.functions
    of_all = at.log_density + log_prior(spec, at, posterior.values, local)
    of_all -= jnp.sum(functions.kl)
    return of_all + rate.share * (bound_given(spec, at, posterior, squares) - of_all)
