# SPDX-License-Identifier: Apache-2.0
"""Noise scales at which chains start, and draws of noise scales and of what these depend on.

Given slabs that explain every observation, a small noise scale stays small, and so long as it does,
most of the weights stay included. With the slabs integrated out it is free.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float
import numpy as np

from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_spikeslab.algebra.coefficients import whitened
from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.algebra.pairs import Design, in_parts, predictor
from numpyro_spikeslab.algebra.search import choose, on_real_line, slice_sample
from numpyro_spikeslab.algebra.variates import normal, uniform
from numpyro_spikeslab.reading.roles import NoiseRole, Tally
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.support.precision import within_single
from numpyro_spikeslab.support.priors import base_of

# Most observations: a step decomposes their covariance.
MAX_OBS = 1024
# Standard deviation of the change of the log scale that a step proposes.
STEP = 2.0
# Rounds over the numbers on which scales depend: more would cost more than they add.
NUM_ROUNDS = 2
# Standard deviation of the logs of the scales at which chains start.
SPREAD = 0.5


def start_noise(key: Array, now: Current) -> dict[str, Any]:
    """Draw noise scales around the scales of the observations at weights of zero.

    A scale that its prior does not allow stays.
    """
    new: dict[str, Any] = {}
    for role in now.roles(NoiseRole):
        value, squares = now.values[role.site], now.at.squares(now.at.Y)
        count, total = role.tally(now.index(role), {"noise": Tally(now.at.count, squares)})
        factor = jnp.exp(SPREAD * random.normal(key, value.shape, value.dtype))
        scale = factor * jnp.sqrt(total / count).astype(value.dtype)
        inside = (scale > 0) & base_of(now.at.priors[role.site]).support(scale)
        new[role.site] = jnp.where(inside, scale, value)
    return new


def draw_noise(key: Array, now: Current, sweeps: Sweeps) -> Current:
    """Draw the noise scale of a design given the spikes, then the slabs of included weights.

    A Metropolis step, made only if more weights are included than half the observations.
    """
    reading, at, form, num_obs = now.reading, now.at, now.reading.form, len(now.at.Y)
    if not form.is_design or not now.roles(NoiseRole) or num_obs > min(form.size, MAX_OBS):
        return now
    (role,), relative, (spikes, slabs) = now.roles(NoiseRole), at.relative[:, 0], now.weights()
    index, value, scales = now.index(role), now.values[role.site], jnp.sqrt(at.prior.variance[0])
    # not in a branch, which could not store it
    before, design = (value, slabs[0]), reading.design_at(now.values, relative)

    def step():
        rows, deviation, _ = now.coefficients(now.values)
        covariates = whitened(rows, relative)
        target = at.whitened + deviation @ covariates
        ends = np.cumsum([1, index.size, form.size, len(covariates)])
        level, *numbers = jnp.split(uniform(key, (int(ends[-1]) + num_obs,), target.dtype), ends)
        change, *numbers = map(normal, numbers)
        # observations may count otherwise than once
        tally = role.tally(index, {"noise": Tally(at.count - num_obs, jnp.zeros_like(at.count))})
        start, log_density, back = role.target(tally, at.priors[role.site], value)
        end = start + STEP * change.reshape(start.shape)
        sigma2 = jnp.stack([index.take(back(x) ** 2, at.sigma2)[0] for x in (start, end)])
        integrate = given_spikes if sweeps == Sweeps.AS_PROGRAM else within_single(given_spikes)
        terms, drawn = integrate(design, covariates, target, spikes[0] * scales, sigma2, numbers)
        ratio = jnp.sum(log_density(end) - log_density(start)) + terms[1] - terms[0]
        accepts = jnp.log((1 + level[0]) / 2) < ratio
        return choose(
            accepts, (back(end), jnp.where(spikes[0] > 0, scales * drawn, slabs[0])), before
        )

    value, slabs = lax.cond(2 * jnp.sum(spikes) > at.count[0], step, lambda: before)
    values = now.values | {role.site: value} | form.split(slabs, "{}_slab")
    return replace(now, values=values, at=role.place(at, index, value))


def given_spikes(
    design: Design,
    covariates: Float[Array, "C N"],
    target: Float[Array, " N"],
    scales: Float[Array, " P"],
    sigma2: Float[Array, " 2"],
    numbers: Any,
) -> tuple[Float[Array, " 2"], Float[Array, " P"]]:
    """Integrate weights and coefficients out at two noise variances.

    :param scales: prior deviations of the weights, 0 where they are excluded.
    :param numbers: standard normal ones of the weights, the coefficients and the observations.
    :return: log evidences, and a draw of the weights at the second, in units of ``scales``.
    """

    def add(gram, part):
        rows = part[0] * part[1][:, None]
        return gram + rows.T @ rows, None

    weights, coefficients, noise = numbers
    parts = design.rows, in_parts(scales, *design.rows.shape[:2])
    gram, _ = lax.scan(add, covariates.T @ covariates, parts)
    one = jnp.eye(len(gram), dtype=gram.dtype)
    roots = jnp.linalg.cholesky(gram + sigma2[:, None, None] * one)
    whitening = solve_triangular(roots, jnp.stack([one, one]), lower=True)
    halves = jnp.log(jnp.diagonal(whitening, axis1=1, axis2=2)) - 0.5 * (whitening @ target) ** 2
    # a draw of everything from the prior is moved to the observations (Bhattacharya et al., 2016)
    fit = predictor(design, scales * weights) + coefficients @ covariates
    residual = target - fit - jnp.sqrt(sigma2[1]) * noise
    moved = design.features @ (whitening[1].T @ (whitening[1] @ residual))
    # without a root, as rounding may leave it, the scale is too small
    terms = jnp.nan_to_num(jnp.sum(halves, axis=1), nan=-jnp.inf)
    return terms, weights + scales * moved[: scales.size]


def draw_noise_sites(key: Array, now: Current, new: dict[str, Any]) -> dict[str, Any]:
    """Draw the sites on which only noise scales depend, given the residuals: number by number.

    :param new: values of sites that have been drawn, the weights among them.
    """
    names = [name for name in now.reading.form.scales if name in now.own_sites]
    if not names:
        return {}
    problem, values, priors = now.reading.problem, now.values | new, now.at.priors
    residual = now.observed.seen(now.observed.value - now.predictor(new))
    transforms = {name: biject_to(priors[name].support) for name in names}
    free, unflatten = ravel_pytree({k: on_real_line(x, values[k]) for k, x in transforms.items()})

    def sites_at(free):
        return {name: transforms[name](x) for name, x in unflatten(free).items()}

    def log_density(free):
        sites, volume = sites_at(free), jnp.zeros(())
        for name, x in unflatten(free).items():
            volume += jnp.sum(transforms[name].log_abs_det_jacobian(x, sites[name]))
            volume += jnp.sum(priors[name].log_prob(sites[name]))
        scale = problem.run(values | sites, of=lambda run: problem.observations(run).scale)
        return volume + jnp.sum(now.observed.counted(dist.Normal(0, scale).log_prob(residual)))

    def update(k, now):
        place = k % now.size

        def evaluate(x):
            return log_density(now.at[place].set(x)), ()

        x, _ = slice_sample(random.fold_in(key, k), evaluate, now[place])
        return now.at[place].set(x)

    return sites_at(lax.fori_loop(0, NUM_ROUNDS * free.size, update, free))
