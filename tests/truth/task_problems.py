# SPDX-License-Identifier: Apache-2.0
"""Tasks that mix latent functions, as the sweeps have them, and their dense algebra."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.fitting.ascent import begin, chunks
from numpyro_spikeslab.fitting.features import engine_of
from numpyro_spikeslab.fitting.function_updates import Terms, condition
from numpyro_spikeslab.fitting.posterior import Engine, FunctionFactors, Posterior
from numpyro_spikeslab.fitting.starts import start_random
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.view import View
import truth

N, Q, M = 15, 6, 2
SMOOTH = kernels.ExpSquared(1.0)


class Planted(NamedTuple):
    """Observations, and what they were made of."""

    Y: np.ndarray
    phi: np.ndarray
    included: np.ndarray
    f: np.ndarray


def plant(num_points: int, num_tasks: int, num_factors: int, seed: int) -> Planted:
    rng = np.random.default_rng(seed)
    included = rng.uniform(size=(num_tasks, num_factors)) < 0.3
    W = included * rng.choice([-1, 1], included.shape) * (rng.uniform(size=included.shape) + 0.5)
    phi = rng.normal(size=(num_factors, num_points))
    f = (W @ phi).T
    Y = f + 0.3 * np.std(f) * rng.normal(size=f.shape)
    Y[rng.uniform(size=Y.shape) < 0.1] = np.nan
    return Planted(Y, phi, included, f)


def observations(num_points: int = N, num_tasks: int = Q, num_functions: int = M) -> Any:
    """Inputs, and responses with gaps."""
    rng = np.random.default_rng(0)
    x = np.linspace(0, 3, num_points)
    f = np.stack([np.sin(2 * x), np.cos(3 * x + 1), x - 1.5][:num_functions], 1)
    shape = (num_tasks, num_functions)
    W = rng.normal(size=shape) * (rng.uniform(size=shape) < 0.7)
    Y = f @ W.T + 0.2 * rng.normal(size=(num_points, num_tasks))
    Y[rng.uniform(size=Y.shape) < 0.2] = np.nan
    return x, Y


def model_of(prior: str, functions: list[Any], mean: Any = None) -> Any:
    """Tasks with these priors of noise, inclusion and slab scale; sites without one are params."""

    def number(site, start, density=None, shape=()):
        if density is not None:
            return numpyro.sample(site, density.expand(shape).to_event())
        of_unit = site == "inclusion"
        constraint = dist.constraints.unit_interval if of_unit else dist.constraints.positive
        return numpyro.param(site, jnp.full(shape, start), constraint=constraint)

    def model(X, Y):
        num_tasks, num_functions = Y.shape[1], len(functions)
        phi = nss.latent_functions("phi", functions, X, mean)
        weak, shared, own = (prior == x for x in ("weak", "shared", "own inclusion"))
        density = dist.HalfNormal(2.0) if weak or shared else None
        noise = number("noise", 1.0, density, () if shared else (num_tasks,))
        slab = number("slab_scale", 1.0, dist.HalfNormal(1.5) if weak else None)
        density = dist.Beta(2.0, 3.0) if weak or own else None
        inclusion = number("inclusion", 0.5, density, (num_functions,) if own else ())
        W = truth.task_weights(num_tasks, num_functions, inclusion, slab)
        with handlers.mask(mask=~np.isnan(Y)):
            numpyro.sample("Y", dist.Normal((W @ phi).T, noise), obs=np.nan_to_num(Y))

    return model


class Problem(NamedTuple):
    """A model as it was read, what its code is compiled for and takes, and a posterior."""

    reading: Reading
    engine: Engine
    posterior: Posterior

    @property
    def at(self) -> View:
        return self.engine.view(self.posterior)

    @property
    def functions(self) -> FunctionFactors:
        assert self.posterior.functions is not None
        return self.posterior.functions

    @property
    def prior(self) -> Any:
        return self.engine.function_prior(self.at)

    def bound(self, posterior: Posterior) -> Any:
        return _bound(self.engine, posterior)

    def run(self, num_steps: int) -> tuple["Problem", np.ndarray]:
        """After some sweeps, and the bounds."""

        start = begin(self.engine, self.posterior)
        ends, losses = zip(*chunks(self.engine, start, num_steps, -1.0), strict=True)
        return self._replace(posterior=ends[-1].posterior), -np.concatenate(losses)

    def with_function(
        self, m: Any, theta: Any, alpha: Any, h: Any, posterior: Posterior | None = None
    ) -> Posterior:
        """The posterior with another ``q(phi_m)``."""
        posterior = posterior or self.posterior
        prior = self.engine.function_prior(self.engine.view(posterior))
        new = condition(prior, posterior, Terms(m, alpha, h), theta, self.functions.step[m])
        return self.engine.with_kernels(new)

    def covariance(self, m: int) -> np.ndarray:
        return np.asarray(self.prior.covariance(m, self.functions.theta[m]).to_dense())


_bound = jax.jit(Engine.bound)


def problem(model: Any, args: tuple, plain: bool = False, start: Any = None) -> Problem:
    """A model at a random start, or at what ``start`` makes of a blank posterior."""
    reading = Reader(model, "test")(args, {})
    engine = engine_of(reading, plain, None)
    values = {name: jnp.ones_like(x) for name, x in reading.generic.items()}
    read: Any = reading.functions
    zero, theta = jnp.zeros_like(read.mean), read.theta(values)
    weights = PairedMeanField(*jnp.zeros((3, *engine.form.shape)))
    functions = FunctionFactors(zero, zero, zero, zero, zero[:, 0], zero, theta, theta)
    blank = Posterior(weights, functions, values, None)
    if start is None:
        return Problem(reading, engine, start_random(engine, blank, random.key(0)))
    return Problem(reading, engine, start(engine, blank))


@cache
def started(prior: str, plain: bool) -> Problem:
    """Shared by the tests, for its compilations."""
    assert jax.config.jax_enable_x64
    mean = 0.3 * np.random.default_rng(1).normal(size=(M, N))
    return problem(model_of(prior, [SMOOTH] * M, mean), observations(), plain)


@cache
def small(prior: str = "weak") -> Problem:
    """After two sweeps, which are optimal for nothing."""
    return started(prior, True).run(2)[0]


def dense_moments(problem: Problem, at: View) -> tuple[np.ndarray, np.ndarray]:
    """Precision and linear term of all function values together, from the N Q observations."""
    weights = problem.posterior.weights
    W = np.asarray(weights.mean)
    spread = np.asarray(weights.slab_moments[1]) - W**2
    tau = np.broadcast_to(at.relative / at.sigma2, at.Y.shape)
    # row (n, q), column (m, n)
    design = np.einsum("nk,qm->nqmk", np.eye(len(tau)), W).reshape(tau.size, -1)
    P = design.T @ (tau.ravel()[:, None] * design)
    P += np.diag(np.einsum("nq,qm->mn", tau, spread).ravel())
    return P, design.T @ (tau * np.asarray(at.Y)).ravel()


def slope(f: Any, eps: float = 1e-4) -> float:
    return float((f(eps) - f(-eps)) / (2 * eps))
