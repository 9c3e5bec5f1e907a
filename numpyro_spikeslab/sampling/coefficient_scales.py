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
from numpyro_spikeslab.reading.coefficient_rows import ColumnsWithout
from numpyro_spikeslab.reading.roles import NUM_UPDATES, CoefficientRole, elementwise
from numpyro_spikeslab.sampling.current import Current

MAX_WORK = 1e7
"""Largest sum of cubed sizes of the matrices that a step decomposes for the scales."""


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
    ) -> tuple[Float[Array, " R"], Any]:
        """Draw one number after the other.

        :param conditional: ``(k, x, at(x)) ->`` the log likelihood of number k, given the others.
        :param at: what the likelihoods share at new numbers; ``start`` is that at the present ones.
        :return: the numbers, and ``at`` these.
        """

        def update(k, carry):
            x, now = carry
            likelihood = conditional(k, x, now)

            def log_density(y):
                return self.log_prior(x.at[k].set(y))[k] + likelihood(y), ()

            new = slice_sample(random.fold_in(key, k), log_density, x[k], NUM_UPDATES)[0]
            x = x.at[k].set(new)
            return x, at(x)

        return lax.fori_loop(0, len(self.x), update, (self.x, start))


def draw_scales(
    key: Array, now: Current, columns: ColumnsWithout, residual: Float[Array, " NK"]
) -> tuple[dict[str, Any], ColumnsWithout, Float[Array, " NK"]]:
    """Draw the scales under a Normal likelihood given the weights alone.

    :param residual: of ``columns``, at these weights.
    :return: new values by site, and both at these.
    """
    num_inside, num_obs = columns.basis.shape
    if not has_own_scales(now) or not now.reading.form.likelihood.is_fixed:
        return {}, columns, residual
    scales, (J, E, e, sigma2, whitening) = LogScales(now, now.values), columns.coefficients
    if len(scales.x) * num_inside**3 > MAX_WORK:
        return {}, columns, residual
    inside = solve_triangular(whitening[0], residual[num_obs:], lower=True)

    def at(x):
        return coefficients_of(J, E * scales.growth(x), e, sigma2)

    def conditional(k, x, now):
        """Return the log density of one scale, by the directions in which it has evidence."""
        white = now.whitening[0] / jnp.sqrt(sigma2)
        own = white @ jnp.where(scales.members[k], now.E[0], 0)
        shares, directions = jnp.linalg.eigh(own @ own.T)
        squares = ((white @ inside) @ directions) ** 2

        def log_density(y):
            total = 1 + jnp.expm1(2 * (y - x[k])) * jnp.clip(shares, 0, 1)
            return -0.5 * jnp.sum(jnp.log(total) + squares / total)

        return log_density

    x, coefficients = scales.draw(key, conditional, columns.coefficients, at)
    prior = columns.standard.prior
    prior = prior._replace(scale=prior.scale * scales.growth(x))
    standard = columns.standard._replace(prior=prior)
    columns = columns._replace(standard=standard, coefficients=coefficients)
    residual = jnp.concatenate([residual[:num_obs], coefficients.whitening[0] @ inside])
    return scales.unflatten(jnp.exp(x)), columns, residual


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

    x, _ = scales.draw(key, conditional, f, at)
    moved = values_at(u * scales.growth(x)) | scales.unflatten(jnp.exp(x))
    return sites | {k: x.astype(now.values[k].dtype) for k, x in moved.items()}


def has_own_scales(now: Current) -> bool:
    """Whether a kernel draws scales of coefficients of a design, and all coefficients."""
    form = now.reading.form
    owns = now.own_sites.issuperset(form.coefficients) and bool(now.roles(CoefficientRole))
    return owns and form.is_design
