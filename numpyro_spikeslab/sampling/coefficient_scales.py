# SPDX-License-Identifier: Apache-2.0
"""Draws of the prior scales of coefficients, such as the spread of the effects of groups.

Given few observations of each group, a scale and its coefficients depend on each other so much that
drawn in turn they hardly move. So a scale is drawn with the coefficients integrated out, or moves
together with them.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.coefficients import coefficients_of
from numpyro_spikeslab.algebra.search import slice_sample
from numpyro_spikeslab.reading.coefficient_rows import ColumnsWithout, Standardised
from numpyro_spikeslab.reading.roles import NUM_UPDATES, CoefficientRole, elementwise
from numpyro_spikeslab.sampling.current import Current

MAX_SIZE = 24
"""Largest matrix that a step decomposes for a scale. For larger ones LAPACK takes ten times as
long, and scales that move with their coefficients have more effective draws per second."""


class LogScales:
    """The logs of R scales of C coefficients, and how often each enters a coefficient."""

    def __init__(self, now: Current, values: dict[str, Any]) -> None:
        roles = sorted(now.roles(CoefficientRole), key=lambda role: role.site)
        self.priors = {role.site: now.at.priors[role.site] for role in roles}
        self.x, self.unflatten = ravel_pytree({k: jnp.log(values[k]) for k in self.priors})
        entries = (now.index(role) for role in roles)
        self.members = jnp.concatenate([x.entries == jnp.arange(x.size)[:, None] for x in entries])

    def log_prior(self, x: Float[Array, " R"]) -> Float[Array, " R"]:
        """Return the prior log density of each number."""
        each = {
            name: elementwise(self.priors[name], jnp.shape(y))(jnp.exp(y)) + y
            for name, y in self.unflatten(x).items()
        }
        return ravel_pytree(each)[0]

    def growth(self, x: Float[Array, " R"]) -> Float[Array, " C"]:
        """Return the factors by which the scales of the coefficients are larger at new numbers."""
        return jnp.exp((x - self.x) @ self.members)

    def draw(
        self, key: Array, conditional: Callable, start: Any, at: Callable[[Any], Any]
    ) -> Float[Array, " R"]:
        """Draw one number after the other.

        :param conditional: ``(k, x, at(x)) ->`` the log likelihood of number k, given the others.
        :param at: what the likelihoods share at new numbers; ``start`` is that at the present ones.
        """

        def update(k, carry):
            x, now = carry
            likelihood = conditional(k, x, now)

            def log_density(y):
                return self.log_prior(x.at[k].set(y))[k] + likelihood(y), ()

            new = slice_sample(random.fold_in(key, k), log_density, x[k], NUM_UPDATES)[0]
            x = x.at[k].set(new)
            return x, lax.cond(k + 1 < x.size, at, lambda _: now, x)

        return lax.fori_loop(0, len(self.x), update, (self.x, start))[0]

    def applied(
        self, x: Float[Array, " R"], E: Float[Array, "1 K C"], standard: Standardised
    ) -> tuple[Float[Array, "1 K C"], Standardised, dict[str, Any]]:
        """Return rows and priors of coefficients at new numbers, and the values of the sites."""
        growth = self.growth(x)
        prior = standard.prior._replace(scale=standard.prior.scale * growth)
        return E * growth, standard._replace(prior=prior), self.unflatten(jnp.exp(x))


def draw_coefficients(
    key: Array, now: Current, columns: ColumnsWithout, inside: Float[Array, " K"]
) -> tuple[dict[str, Any], Float[Array, " K"]]:
    """Draw the coefficients and their scales under a Normal likelihood given the weights.

    :param inside: the residual of ``columns`` at these weights, in the span of the covariates.
    :return: new values by site, and the residual in the span at these.
    """
    (standard, (J, E, e, sigma2, whitening)), new = columns[:2], {}
    inside = solve_triangular(whitening[0], inside, lower=True)
    noise = random.normal(key, E.shape[2:], E.dtype)
    has_scales = has_own_scales(now) and now.reading.form.likelihood.is_fixed
    scales: Any = LogScales(now, now.values) if has_scales else None
    integrates, key = len(inside) <= MAX_SIZE, random.fold_in(key, 1)

    def at(x):
        return coefficients_of(J, E * scales.growth(x), e, sigma2)

    def integrated(k, x, now):
        """Return the log density of one scale, by the directions in which it has evidence."""
        white = now.whitening[0] / jnp.sqrt(sigma2)
        own = white @ jnp.where(scales.members[k], now.E[0], 0)
        shares, directions = jnp.linalg.eigh(own @ own.T)
        squares = ((white @ inside) @ directions) ** 2

        def log_density(y):
            total = 1 + jnp.expm1(2 * (y - x[k])) * jnp.clip(shares, 0, 1)
            return -0.5 * jnp.sum(jnp.log(total) + squares / total)

        return log_density

    if scales and integrates:
        x = scales.draw(key, integrated, columns.coefficients, at)
        E, standard, new = scales.applied(x, E, standard)
    u = columns.coefficients._replace(E=E).draw(inside, noise)
    inside -= E[0] @ u
    if scales and not integrates:
        parts = (scales.members * u) @ E[0].T

        def left(x):
            return inside - jnp.expm1(x - scales.x) @ parts

        def moved(k, x, now):
            slope, curvature = parts[k] @ now / sigma2[0], parts[k] @ parts[k] / sigma2[0]
            return lambda y: jnp.expm1(y - x[k]) * (slope - 0.5 * curvature * jnp.expm1(y - x[k]))

        x = scales.draw(key, moved, inside, left)
        inside, (_, standard, new) = left(x), scales.applied(x, E, standard)
    return standard.values(u[None]) | new, inside


def move_scales(
    key: Array,
    now: Current,
    sites: dict[str, Any],
    log_density: Callable[[Float[Array, "..."]], Float[Array, "..."]],
) -> dict[str, Any]:
    """Move each scale and its coefficients by one factor, under any likelihood of a design.

    :param sites: new values of pairs and coefficients.
    :param log_density: of each observation, given the predictor.
    :return: the sites, with others of coefficients and of scales.
    """
    if not has_own_scales(now):
        return sites
    scales, f = LogScales(now, now.values), now.predictor(sites)
    rows, u, values_at = now.coefficients(now.values | sites)
    parts = jnp.where(now.at.relative[:, 0] > 0, (scales.members * u) @ rows, 0)

    def at(x):
        return f + (jnp.expm1(x - scales.x) @ parts).reshape(f.shape)

    def conditional(k, x, now):
        part = parts[k].reshape(f.shape)
        return lambda y: jnp.sum(log_density(now + jnp.expm1(y - x[k]) * part))

    x = scales.draw(key, conditional, f, at)
    moved = values_at(u * scales.growth(x)) | scales.unflatten(jnp.exp(x))
    return sites | {k: x.astype(now.values[k].dtype) for k, x in moved.items()}


def has_own_scales(now: Current) -> bool:
    """Whether a kernel draws scales of coefficients of a design, and all coefficients."""
    form = now.reading.form
    owns = now.own_sites.issuperset(form.coefficients) and bool(now.roles(CoefficientRole))
    return owns and form.is_design
