# SPDX-License-Identifier: Apache-2.0
"""One step of a sampler of latent functions: from values of sites to arrays, and back."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.function_prior import KnownFunctions
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import (
    NoiseRole,
    Role,
    SlabRole,
    Statistics,
    elementwise,
)
from numpyro_spikeslab.sampling.function_state import Fixed, Moves, State
from numpyro_spikeslab.sampling.paired_gibbs import draw_tasks
from numpyro_spikeslab.sampling.scale_draws import Current, squares_given


@dataclass(frozen=True)
class LatentStep(Current):
    """A step of :class:`~numpyro_spikeslab.LatentGibbs`: the model at the current values."""

    @property
    def owns_weights(self) -> bool:
        """Whether the kernel draws the weights, too."""
        return self.reading.form.pairs[0].spike in self.own

    @property
    def functions(self) -> KnownFunctions:
        """The model's functions."""
        assert self.reading.functions is not None
        return self.reading.functions

    @property
    def phi(self) -> Float[Array, "M N"]:
        """Current values of the functions."""
        return self.values[str(self.reading.form.functions)]

    def draw_weights(self, key: Array, now: tuple[Any, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Draw spikes and slabs; also return the probability with which each spike is drawn."""
        (pair,) = self.reading.form.pairs
        spikes, slabs, inclusion = draw_tasks(key, self.at, self.phi, weights(*now))
        shaped = {pair.name: inclusion.reshape(pair.shape).astype(float)}
        return spikes.astype(slabs.dtype), slabs, shaped

    def fixed(self, rescale: bool) -> Fixed:
        """Collect what stays fixed while the functions are drawn."""
        at, functions = self.at, self.functions
        drawn = tuple(name for name in self.reading.form.kernels if name in self.own)
        parameters = replace(functions.parameters, latent=drawn)
        prior = functions.prior(at.priors)._replace(parameters=parameters)
        moves = self.moves(rescale) if self.owns_weights else None
        return Fixed(at.Y, jnp.broadcast_to(at.relative, at.Y.shape), prior, moves)

    def moves(self, rescale: bool) -> Moves:
        """Collect what may move with the functions."""
        at, noises = self.at, self.roles(NoiseRole)
        owned = [self._owns_entry(role) for role in noises]
        own_noise = sum(owned, jnp.zeros(at.sigma2.shape, bool))

        def log_prior_of_noise(sigma, q):
            total = jnp.zeros_like(sigma)
            for role, is_owned in zip(noises, owned, strict=True):
                shape = jnp.shape(self.values[role.site])
                each = elementwise(at.priors[role.site], shape)(jnp.full(shape, sigma))
                total += self.index(role)[q].take(each, total) * is_owned[q]
            return total

        def draw_slabs(key, scales, w):
            if not rescale:
                return scales, at.prior.variance
            known = w != 0
            statistics = Statistics(known, known * jnp.ones_like(w), w**2, at.count, at.sigma2)
            scales = self.draw_roles(key, SlabRole, scales, statistics)
            return scales, self.slab_variance(scales)

        flip = rescale and self.functions.functions.mean is None
        return Moves(at.prior.log_odds, draw_slabs, own_noise, log_prior_of_noise, rescale, flip)

    def _owns_entry(self, role: Role) -> Any:
        """Find the tasks whose entry of a noise scale's site no other task takes."""
        index, one = self.index(role), jnp.ones_like(self.at.sigma2)
        return index.take(index.sum(one), jnp.zeros_like(one)) == 1

    def start(self, w: Float[Array, "Q M"]) -> State:
        """Make the state of the function sampler from the current weights."""
        scales = {role.site: self.values[role.site] for role in self.roles(SlabRole)}
        noise = jnp.sqrt(self.at.sigma2)
        for role in self.roles(NoiseRole):
            # the view of a sparse table has no noise scale for a task without entries
            noise = self.index(role).take(self.values[role.site], noise)
        phi, variance = self.phi, self.at.prior.variance
        residual = self.at.Y - phi.T @ w.T if self.at.layout is None else self.at.Y
        return State(phi, self.functions.theta(self.values), w, scales, variance, noise, residual)

    def finish(self, key: Array, now: tuple[Any, Any], draw: State) -> dict[str, Any]:
        """Draw scales and probabilities, and return values of all sites the kernel may have.

        :param now: spikes and slabs before the functions were drawn.
        """
        (pair,), (spikes, slabs) = self.reading.form.pairs, now
        if self.owns_weights:
            spikes = (draw.weights != 0).astype(spikes.dtype)
        slabs = jnp.where(spikes > 0, draw.weights, slabs)
        # scales are drawn without the excluded slabs, which are then drawn from their prior
        counted = spikes > 0 if self.owns_weights else jnp.ones_like(spikes)
        squares = squares_given(self.at, draw.phi, draw.weights)
        values = self.values | draw.slab_scales
        for role in self.roles(NoiseRole):
            values[role.site] = self.index(role).put(values[role.site], draw.noise)
        new, slabs = self.draw(random.split(key), values, (spikes, slabs), squares, counted)
        return (
            self.functions.parameters.scatter(draw.theta)
            | new
            | {
                str(self.reading.form.functions): draw.phi,
                pair.spike: spikes,
                pair.slab: slabs,
            }
        )


def draw_rows(key: Array, at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Any:
    """Draw white functions of a sparse table, jointly at each row, given the weights."""
    assert at.layout is not None
    side, (M, N) = at.layout.by_rows, phi.shape
    features = w, jnp.zeros((len(w), 0), w.dtype), 1 / at.sigma2
    noise = random.normal(key, (N, M), phi.dtype)

    def draw(sums, rows):
        root = jnp.linalg.cholesky(sums.G + jnp.eye(M, dtype=sums.G.dtype))
        white = solve_triangular(root, sums.b[..., None], lower=True) + noise[rows][..., None]
        return solve_triangular(root, white, lower=True, trans=1)[..., 0]

    return over_blocks(side, N, features, at.Y, at.relative, draw).T


def recruit(
    key: Array,
    at: View,
    phi: Float[Array, "M N"],
    spikes: Float[Array, "Q M"],
    slabs: Float[Array, "Q M"],
) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
    """Give a function that no task uses to a task, chosen by its share of unexplained variance.

    The function's next draw then comes from the residual of this task. This does not leave the
    posterior invariant.
    """
    idle = jnp.sum(spikes, axis=0) == 0
    m = jnp.argmax(idle)
    total = squares_given(at, phi, jnp.zeros_like(slabs))
    unexplained = squares_given(at, phi, jnp.where(spikes > 0, slabs, 0))
    q = random.categorical(key, jnp.log(unexplained / jnp.where(total > 0, total, 1)))
    slab = jnp.where(idle[m], jnp.sqrt(at.prior.variance[q, m]), slabs[q, m])
    spike = jnp.where(idle[m], 1, spikes[q, m])
    return spikes.at[q, m].set(spike), slabs.at[q, m].set(slab)
