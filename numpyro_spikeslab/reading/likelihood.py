# SPDX-License-Identifier: Apache-2.0
"""The likelihood: the one place that knows that observations are Normal.

For others a Gaussian stands in; see :class:`~numpyro_spikeslab.algebra.augmentation.StandIn`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.observations import Observations
from numpyro_spikeslab.algebra.sparse_sums import Entries
from numpyro_spikeslab.models.primitives import ENTRIES_MARK
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.support.priors import WRAPPERS, base_of


def is_normal(fn: dist.Distribution) -> bool:
    """Whether observations are Normal, with independent errors or a joint covariance."""
    return type(base_of(fn)) in (dist.Normal, dist.MultivariateNormal)


def has_density(fn: dist.Distribution) -> bool:
    """Whether observations are Normal, or each is a number with a density of its own."""
    return is_normal(fn) or base_of(fn).event_dim == 0


class Gaussian(NamedTuple):
    """A Gaussian likelihood, of an observed Normal site or in place of another density.

    All arrays broadcast to the shape of the observations.

    - **value** - the observations.
    - **predictor**, **scale** - location and standard deviation of their distribution.
    - **count** - how often each counts: masks times ``handlers.scale``.
    - **entries** - the mark of a sparse table: row and column of each observation.
    """

    value: Array
    predictor: Array
    scale: Array
    count: Array  # type: ignore[assignment]
    entries: Entries | None

    @classmethod
    def of(cls, site: dict[str, Any], log_prob: Callable[[Any, Any], Any]) -> "Gaussian":
        """Make the parts of a site.

        :param log_prob: of a distribution and values. If it is not Normal, the log density of each
            observation is in the place of the predictor, until that is found, and the scale is 1.
        """
        fn, value = site["fn"], jnp.asarray(site["value"])
        base, rank = base_of(fn), jnp.ndim(value)

        def aligned(x, event_dim=0):
            # a factor of whole events has no axes for their parts
            x = jnp.asarray(x, float)
            x = x.reshape(x.shape + (1,) * event_dim)
            return x.reshape((1,) * (rank - x.ndim) + x.shape)

        count = aligned(1.0 if site["scale"] is None else site["scale"], fn.event_dim)
        while isinstance(fn, WRAPPERS):
            if isinstance(fn, dist.MaskedDistribution):
                count = count * aligned(fn._mask, fn.event_dim)
            fn = fn.base_dist
        if isinstance(base, dist.MultivariateNormal):
            loc, scale = _independent(base, value)
        elif is_normal(base):
            loc, scale = base.loc, base.scale
        else:
            # what is missing may be NaN, whose slope in other sites would be NaN, too
            allowed = base.support.feasible_like(value).astype(value.dtype)
            seen = value if jnp.size(count) == 1 else jnp.where(count > 0, value, allowed)
            loc, scale = jnp.broadcast_to(log_prob(base, seen), value.shape), 1.0
        entries = site["infer"].get(ENTRIES_MARK)
        if entries is not None:
            entries = Entries(*(jnp.asarray(x, jnp.int32) for x in entries))
        parts = value, aligned(loc), aligned(scale), count
        value, loc, scale, count = (x.astype(jnp.result_type(loc, float)) for x in parts)
        return cls(value, loc, scale, count, entries)

    def in_tasks(
        self, form: Form, layout: Observations, stand_in: StandIn | None = None
    ) -> dict[str, Any]:
        """Return the fields of a view that describe the observations.

        :param stand_in: for the density of each observation.
        """
        if stand_in is not None:
            likelihood = self._replace(value=stand_in.target, scale=stand_in.precision**-0.5)
            log_norm = jnp.sum(jnp.where(self.count > 0, self.count * stand_in.log_norm, 0))
            return likelihood.in_tasks(form, layout) | {"log_scale": -log_norm}
        full = jnp.shape(self.value)

        def tasks_last(x):
            # broadcast before columns are flattened
            return form.tasks_last(jnp.broadcast_to(x, full) if form.kind == COLUMNS else x)

        residual = jnp.where(self.count > 0, self.value - self.predictor, 0)
        Y = form.tasks_last(jnp.broadcast_to(residual, full))
        counts = jnp.broadcast_to(tasks_last(self.count), Y.shape)
        scales = tasks_last(self.scale) if form.varying_noise else form.tasks_last(self.scale)
        relative = counts / scales**2 if form.varying_noise else counts
        info = jnp.finfo(relative.dtype)
        # the precision of observations that are all zero stays a number
        smallest = info.tiny**0.75
        values = form.tasks_last(jnp.where(self.count > 0, self.value, 0))
        rounding = relative * ((info.eps * values) ** 2 + smallest)
        weights = relative[:, :1] if form.complete else relative
        one = jnp.ones((1, 1), scales.dtype)
        return {
            "Y": layout.flat(Y),
            "relative": layout.flat(weights),
            "sigma2": layout.first(one if form.varying_noise else scales**2),
            "count": layout.by_task(counts),
            "rounding": layout.by_task(rounding),
            "log_scale": jnp.sum(counts * (jnp.log(scales) + 0.5 * jnp.log(2 * jnp.pi))),
        }


def _independent(fn: dist.MultivariateNormal, value: Any) -> tuple[Any, Any]:
    """Return location and scale of independent observations of the same density.

    The residuals are whitened, not the observations, which no other site may move.
    """
    residual = value - fn.loc
    shape = *residual.shape[:-1], *fn.scale_tril.shape[-2:]
    root = jnp.broadcast_to(fn.scale_tril, shape)
    scale = jnp.diagonal(fn.scale_tril, axis1=-2, axis2=-1)
    return value - scale * solve_triangular(root, residual[..., None], lower=True)[..., 0], scale
