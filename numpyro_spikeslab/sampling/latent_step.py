# SPDX-License-Identifier: Apache-2.0
"""One step of a sampler of latent functions: from values of sites to arrays, and back."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.observations import Sparse
from numpyro_spikeslab.algebra.pairs import Draw, Draws
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.reading.function_prior import KnownFunctions
from numpyro_spikeslab.reading.roles import SlabRole
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.function_state import Fixed, State


@dataclass(frozen=True)
class LatentStep(Current):
    """A step of :class:`~numpyro_spikeslab.LatentGibbs`: the model at the current values."""

    @property
    def owns_weights(self) -> bool:
        """Whether the kernel draws the weights, too."""
        return self.reading.form.pairs[0].spike in self.own_sites

    @property
    def functions(self) -> KnownFunctions:
        """The model's functions."""
        return self.reading.functions

    @property
    def phi(self) -> Float[Array, "M N"]:
        """Current values of the functions."""
        return self.values[str(self.reading.form.functions)]

    def draw_weights(self, key: Array, now: tuple[Any, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Draw spikes and slabs; also return the probability with which each spike is drawn."""
        (pair,) = self.reading.form.pairs
        before, update = Draws.of(*now), Draw(logistic_and_normal(key, now[1]))
        (spikes, slabs, inclusion), _ = self.at.sweep((self.phi, None), before, update)
        shaped = {pair.name: inclusion.reshape(pair.shape).astype(float)}
        return spikes.astype(slabs.dtype), slabs, shaped

    def fixed(self, rescale: bool) -> Fixed:
        """Collect what stays fixed while the functions are drawn."""
        at, functions = self.at, self.functions
        drawn = tuple(name for name in self.reading.form.kernels if name in self.own_sites)
        parameters = replace(functions.parameters, latent=drawn)
        prior = replace(functions.prior(at.priors), parameters=parameters)
        precision = jnp.broadcast_to(at.relative, at.Y.shape) / at.sigma2
        flip = rescale and functions.functions.mean is None
        return Fixed(self, precision, prior, self.owns_weights, rescale, flip)

    def start(self, w: Float[Array, "Q M"]) -> State:
        """Make the state of the function sampler from the current weights."""
        scales = {role.site: self.values[role.site] for role in self.roles(SlabRole)}
        phi, variance = self.phi, self.at.prior.variance
        theta, residual = self.functions.theta(self.values), self.at.residual(w, phi)
        return State(phi, theta, w, scales, variance, residual)

    def finish(self, key: Array, now: tuple[Any, Any], draw: State) -> dict[str, Any]:
        """Draw scales and probabilities, and return values of all sites the kernel may have."""
        (pair,), (spikes, slabs) = self.reading.form.pairs, now
        if self.owns_weights:
            spikes = (draw.weights != 0).astype(spikes.dtype)
        slabs = jnp.where(spikes > 0, draw.weights, slabs)
        # scales are drawn without the excluded slabs, which are then drawn from their prior
        counted = spikes > 0 if self.owns_weights else jnp.ones_like(spikes)
        squares = self.at.squares(self.at.residual(draw.weights, draw.phi))
        values = self.values | draw.slab_scales
        new, slabs = self.draw(random.split(key), values, (spikes, slabs), squares, counted)
        new = self.functions.parameters.scatter(draw.theta) | new
        functions = str(self.reading.form.functions)
        return new | {functions: draw.phi, pair.spike: spikes, pair.slab: slabs}


def draw_rows(key: Array, at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Any:
    """Draw white functions of a sparse table, jointly at each row, given the weights."""
    assert isinstance(at.layout, Sparse)
    side, (M, N) = at.layout.by_rows, phi.shape
    noise = random.normal(key, (N, M), phi.dtype)

    def draw(sums, noise):
        root = jnp.linalg.cholesky(sums.G + jnp.eye(M, dtype=sums.G.dtype))
        white = solve_triangular(root, sums.b[..., None], lower=True) + noise[..., None]
        return solve_triangular(root, white, lower=True, trans=1)[..., 0]

    features, data = (w, None, 1 / at.sigma2), (at.Y, at.relative)
    return over_blocks(side, N, features, data, draw, noise).T


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
    total = at.squares(at.Y)
    unexplained = at.squares(at.residual(jnp.where(spikes > 0, slabs, 0), phi))
    q = random.categorical(key, jnp.log(unexplained / jnp.where(total > 0, total, 1)))
    slab = jnp.where(idle[m], jnp.sqrt(at.prior.variance[q, m]), slabs[q, m])
    spike = jnp.where(idle[m], 1, spikes[q, m])
    return spikes.at[q, m].set(spike), slabs.at[q, m].set(slab)
