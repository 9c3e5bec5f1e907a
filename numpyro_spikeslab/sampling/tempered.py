# SPDX-License-Identifier: Apache-2.0
r"""The evidence of a model of latent functions, by sequential Monte Carlo from prior to posterior.

Particles start as draws from the prior. A power b of the likelihood rises from 0 to 1: at each rise
particles get the weights :math:`p(y \mid z)^{b' - b}`, are drawn anew by these, and make a step of
:class:`~numpyro_spikeslab.LatentGibbs` at the power b'. The evidence is the product of the mean
weights (Del Moral, Doucet and Jasra, 2006, *Sequential Monte Carlo samplers*).
"""

from collections.abc import Callable
from typing import Any
import warnings

from jaxtyping import Array, Float
import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import Predictive

from numpyro_spikeslab.reading.model_run import run_model, site_log_prob
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.sampling.evidence import MAX_SE, Evidence, check_priors
from numpyro_spikeslab.sampling.latent_gibbs import LatentGibbs
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import double_precision, full_precision

USER = "tempered_evidence"

SHARE = 0.9
"""Effective sample size of the weights at each power, relative to the number of particles."""

LEAST = -1e300
"""Log likelihood of particles under which the data are impossible, so that weights are numbers."""


class Power(handlers.scale):
    """A handler that takes a power of the densities of all observed sites."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Scale the density of a message from an observed site."""
        if msg.get("is_observed"):
            super().process_message(msg)


@full_precision
def evidence_of_functions(
    key: Array, program: Callable, sizes: tuple[int, int], progress_bar: bool
) -> Evidence:
    """Compute :func:`~numpyro_spikeslab.tempered_evidence`.

    :param program: the model with its arguments.
    :param sizes: numbers of islands, and of the particles of each.
    """
    rng = np.random.default_rng(np.asarray(random.bits(random.fold_in(key, 1), (4,))))
    power, logs = 0.0, np.zeros(sizes[0])
    with double_precision(), tqdm(desc="compiling", disable=not progress_bar) as bar:
        state, log_likelihoods, step = particles(key, program, sizes[0] * sizes[1])
        while power < 1:
            # a density that is not a number is one of 0
            log_probs = np.reshape(log_likelihoods(state.z), sizes)
            log_probs = np.nan_to_num(log_probs, nan=LEAST, neginf=LEAST)
            rise = next_rise(log_probs, 1 - power)
            power += rise
            logs += logsumexp(rise * log_probs, axis=1) - np.log(sizes[1])
            state = step(state, resampled(rng, rise * log_probs), power)
            bar.set_description(f"power {power:.2g}", refresh=False)
            bar.update()
    se = float(logs.std(ddof=1) / len(logs) ** 0.5)
    if se > MAX_SE:
        warnings.warn(f"{USER}: the standard error is {se:.2f}. Take more particles.", stacklevel=4)
    return Evidence(float(logsumexp(logs) - np.log(len(logs))), se)


def particles(key: Array, program: Callable, number: int) -> tuple[Any, Callable, Callable]:
    """Draw particles from the prior; return them, and functions that compute their log likelihoods
    and that move chosen ones at a power."""
    _refuse(Reader(program, USER)((), {}))
    kernel = LatentGibbs(lambda power: Power(program, power)())
    key_chains, key_prior = random.split(key)
    try:
        state = kernel.init(random.split(key_chains, number), 0, None, (jnp.ones(()),), {})
    except ValueError as error:
        error.add_note(f"{USER} needs a model that LatentGibbs draws all latent sites of.")
        raise
    # chains start at scales of the data, not at those of the prior
    prior = Predictive(program, num_samples=number)(key_prior)
    state = state._replace(z={name: prior[name] for name in state.z})

    def log_likelihood(z):
        sites = run_model(program, (), {}, z).values()
        seen = (x for x in sites if x["type"] == "sample" and x["is_observed"])
        return sum(jnp.sum(site_log_prob(x)) for x in seen)

    def step(state, chosen, power):
        state = state._replace(z=jax.tree.map(lambda x: x[chosen], state.z))
        return kernel.sample(state, (power,), {})

    return state, jax.jit(lambda z: jax.lax.map(log_likelihood, z)), jax.jit(step)


def next_rise(log_probs: Float[np.ndarray, "I K"], most: float) -> float:
    """Return the largest rise of the power after which the weights of each island are even."""

    def excess(log_rise):
        weights = softmax(np.exp(log_rise) * log_probs, axis=1)
        return float(np.min(1 / np.sum(weights**2, axis=1))) / log_probs.shape[1] - SHARE

    if excess(np.log(most)) >= 0:
        return most
    return float(np.exp(brentq(excess, np.log(1e-300), np.log(most), xtol=1e-6)))


def resampled(rng: np.random.Generator, log_weights: Float[np.ndarray, "I K"]) -> Any:
    """Return the numbers of particles drawn by their weights, systematically in each island."""
    num_islands, size = log_weights.shape
    ends = np.cumsum(softmax(log_weights, axis=1), axis=1)
    levels = (rng.random((num_islands, 1)) + np.arange(size)) / size
    # rounding may leave the last end below the last level
    chosen = np.sum(ends[:, None, :-1] <= levels[:, :, None], axis=2)
    return np.ravel(chosen + size * np.arange(num_islands)[:, None])


def _refuse(reading: Any) -> None:
    """Refuse models without latent functions, and those whose evidence is arbitrary."""
    form, what = reading.form, f"{USER}: the model"
    check_priors(USER, reading)
    if form.functions is None:
        remedy = "Take `log_evidence` of finished chains."
        raise bad(what, "known features", "latent functions", remedy)
    if not form.likelihood.repeated().is_closed:
        got, expected = "one without closed-form updates at powers", "Normal, StudentT, or logits"
        raise bad(f"{USER}: the likelihood of {form.response!r}", got, expected)
