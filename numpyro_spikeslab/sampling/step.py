# SPDX-License-Identifier: Apache-2.0
"""One step of a sampler of latent functions: from values of sites to arrays, and back."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.sparse_sums import at_entries, over_blocks
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.form import Role
from numpyro_spikeslab.reading.view import View, by_task
from numpyro_spikeslab.roles import draw_sites, elementwise, spread, tally
from numpyro_spikeslab.sampling.paired_gibbs import draw_tasks
from numpyro_spikeslab.sampling.scale_draws import Current
from numpyro_spikeslab.sampling.turn import Draw, Held, Moves


@dataclass(frozen=True)
class Step(Current):
    """One step of the kernel."""

    @property
    def owns_weights(self) -> bool:
        return self.reading.form.pairs[0].spike in self.own

    @property
    def phi(self) -> Float[Array, "M N"]:
        return self.values[str(self.reading.form.functions)]

    def draw_weights(self, key: Array, now: tuple[Any, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Spikes, slabs and the inclusion probabilities of these spikes."""
        (pair,) = self.reading.form.pairs
        spikes, slabs, inclusion = draw_tasks(key, self.at, self.phi, weights(*now))
        shaped = {pair.name: inclusion.reshape(pair.shape).astype(float)}
        return spikes.astype(slabs.dtype), slabs, shaped

    def held(self, rescale: bool) -> Held:
        """What stays while the functions are drawn."""
        at, form, known = self.at, self.reading.form, self.reading.functions
        assert known is not None
        own = tuple(name for name in form.kernels if name in self.own)
        prior = known.prior(at.priors)._replace(parameters=replace(known.parameters, latent=own))
        moves = self.moves(rescale) if self.owns_weights else None
        return Held(at.Y, jnp.broadcast_to(at.relative, at.Y.shape), prior, moves)

    def moves(self, rescale: bool) -> Moves:
        """What may move with the functions."""
        at, noises = self.at, self.roles("noise")
        known = self.reading.functions
        assert known is not None
        owned = [self._owns_entry(role) for role in noises]
        own = sum(owned, jnp.zeros(at.sigma2.shape, bool))

        def log_prior_of_noise(sigma, q):
            total = jnp.zeros_like(sigma)
            for role, is_own in zip(noises, owned, strict=True):
                shape = jnp.shape(self.values[role.site])
                each = elementwise(at.priors[role.site], shape)(jnp.full(shape, sigma))
                total += spread(each, self.entries(role)[q], total) * is_own[q]
            return total

        def draw_slabs(key, scales, w):
            if not rescale:
                return scales, at.prior.variance
            scales = draw_sites(key, self.slab_scales(scales, w, w != 0))
            return scales, self.slab_variance(scales)

        flip = rescale and known.functions.mean is None
        return Moves(at.prior.log_odds, draw_slabs, own, log_prior_of_noise, rescale, flip)

    def _owns_entry(self, role: Role) -> Any:
        """Which tasks take an entry of a noise scale's site that no other task takes."""
        index, value = self.entries(role), self.values[role.site]
        takers = tally(jnp.ones(index.shape), index, value)
        return spread(takers, index, jnp.zeros(index.shape)) == 1

    def start(self, w: Float[Array, "Q M"]) -> Draw:
        known = self.reading.functions
        assert known is not None
        scales = {role.site: self.values[role.site] for role in self.roles("slab")}
        noise = jnp.sqrt(self.at.sigma2)
        for role in self.roles("noise"):
            # of entries, the view does not know that of a task without any
            noise = spread(self.values[role.site], self.entries(role), noise)
        return Draw(self.phi, known.theta(self.values), w, scales, noise)

    def finish(self, key: Array, now: tuple[Any, Any], draw: Draw) -> dict[str, Any]:
        """Values of all sites that may be the kernel's, after the numbers have been drawn.

        :param now: spikes and slabs before the functions were drawn.
        """
        form, known = self.reading.form, self.reading.functions
        assert known is not None
        (pair,), (spikes, slabs) = form.pairs, now
        if self.owns_weights:
            spikes = (draw.weights != 0).astype(spikes.dtype)
        slabs = jnp.where(spikes > 0, draw.weights, slabs)
        # excluded slabs have their prior, so scales are drawn without them and they after these
        counted = spikes > 0 if self.owns_weights else jnp.ones_like(spikes)
        squares = squares_given(self.at, draw.phi, draw.weights)
        values = self.values | self._noise_of(draw) | draw.slab_scales
        new, slabs = self.draw(random.split(key), values, (spikes, slabs), squares, counted)
        return (
            known.parameters.scatter(draw.theta)
            | new
            | {
                str(form.functions): draw.phi,
                pair.spike: spikes,
                pair.slab: slabs,
            }
        )

    def _noise_of(self, draw: Draw) -> dict[str, Any]:
        """Noise scales by the names of their sites, given those of the tasks."""
        found = {}
        for role in self.roles("noise"):
            value = jnp.asarray(self.values[role.site])
            flat = jnp.ravel(value).at[self.entries(role)].set(draw.noise, mode="drop")
            found[role.site] = flat.reshape(value.shape)
        return found


def squares_given(at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Float[Array, " Q"]:
    """Sums of squares of what functions and weights leave of each task."""
    if at.layout is None:
        fit = phi.T @ w.T
    else:
        fit = at_entries(at.layout.where, (w, jnp.zeros_like(w)), (phi, jnp.zeros_like(phi)))[0]
    return by_task(at.relative * (at.Y - fit) ** 2, at.sigma2.size, at.layout)


def draw_rows(key: Array, at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Any:
    """Functions without order at each row, jointly, given the weights of entries of a table."""
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
    """Give a function that no task uses to a task, drawn by the share that is left unexplained.

    The function's next draw then comes from the residual of this task. No step of a Markov chain
    with the right distribution: for warm-up only.
    """
    idle = jnp.sum(spikes, axis=0) == 0
    m = jnp.argmax(idle)
    total, left = (
        squares_given(at, phi, w) for w in (jnp.zeros_like(slabs), jnp.where(spikes > 0, slabs, 0))
    )
    q = random.categorical(key, jnp.log(left / jnp.where(total > 0, total, 1)))
    slab = jnp.where(idle[m], jnp.sqrt(at.prior.variance[q, m]), slabs[q, m])
    spike = jnp.where(idle[m], 1, spikes[q, m])
    return spikes.at[q, m].set(spike), slabs.at[q, m].set(slab)
