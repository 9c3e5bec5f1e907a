# SPDX-License-Identifier: Apache-2.0
"""The likelihood: the one place that knows that observations are Normal."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.sparse_sums import Entries, Layout
from numpyro_spikeslab.primitives import ENTRIES_MARK
from numpyro_spikeslab.priors import WRAPPERS, base_of
from numpyro_spikeslab.reading.form import COLUMNS, Form


class Gaussian(NamedTuple):
    """An observed Normal site. All arrays broadcast to the shape of the observations.

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

    @staticmethod
    def matches(site: dict[str, Any]) -> bool:
        """Whether a site has this likelihood."""
        return type(base_of(site["fn"])) is dist.Normal

    @classmethod
    def of(cls, site: dict[str, Any]) -> "Gaussian":
        """Make the parts of a site."""
        fn, value = site["fn"], jnp.asarray(site["value"])
        dtype, rank = jnp.result_type(base_of(fn).loc, float), jnp.ndim(value)

        def aligned(x, event_dim=0):
            # a factor of whole events has no axes for their parts
            x = jnp.asarray(x, dtype)
            x = x.reshape(x.shape + (1,) * event_dim)
            return x.reshape((1,) * (rank - x.ndim) + x.shape)

        count = aligned(1.0 if site["scale"] is None else site["scale"], fn.event_dim)
        while isinstance(fn, WRAPPERS):
            if isinstance(fn, dist.MaskedDistribution):
                count = count * aligned(fn._mask, fn.event_dim)
            fn = fn.base_dist
        entries = site["infer"].get(ENTRIES_MARK)
        if entries is not None:
            entries = Entries(*(jnp.asarray(x, jnp.int32) for x in entries))
        return cls(value.astype(dtype), aligned(fn.loc), aligned(fn.scale), count, entries)

    def in_tasks(self, form: Form, layout: Layout | None) -> dict[str, Any]:
        """Return the fields of a view that describe the observations."""
        shape = form.table if layout is None else (jnp.size(self.value), 1)
        full = jnp.shape(self.value)

        def tasks_last(x):
            # broadcast before columns are flattened
            return form.tasks_last(jnp.broadcast_to(x, full) if form.kind == COLUMNS else x)

        counts = jnp.broadcast_to(tasks_last(self.count), shape)
        scales = tasks_last(self.scale) if form.varying_noise else form.tasks_last(self.scale)
        residual = jnp.where(self.count > 0, self.value - self.predictor, 0)
        Y = form.tasks_last(jnp.broadcast_to(residual, full))
        relative = counts / scales**2 if form.varying_noise else counts
        info = jnp.finfo(relative.dtype)
        # the precision of observations that are all zero stays a number
        smallest = info.tiny**0.75
        values = form.tasks_last(jnp.where(self.count > 0, self.value, 0))
        rounding = relative * ((info.eps * values) ** 2 + smallest)
        weights = relative[:, :1] if form.complete else relative
        if form.varying_noise:
            sigma2 = jnp.ones(form.num_tasks, scales.dtype)
        elif layout is None:
            sigma2 = jnp.broadcast_to(scales[0] ** 2, form.num_tasks)
        else:
            by_entry = jnp.broadcast_to(scales**2, shape)[:, 0]
            # the noise of a task without entries is known only if all tasks share it
            shared = jnp.ones(()) if scales.size > 1 else by_entry[0]
            sigma2 = jnp.full(form.num_tasks, shared).at[layout.where.columns].set(by_entry)
        return {
            "Y": Y if layout is None else Y[:, 0],
            "relative": weights if layout is None else weights[:, 0],
            "sigma2": sigma2,
            "count": by_task(counts, form.num_tasks, layout),
            "rounding": by_task(rounding, form.num_tasks, layout),
            "log_scale": jnp.sum(counts * (jnp.log(scales) + 0.5 * jnp.log(2 * jnp.pi))),
        }


def by_task(x: Array, num_tasks: int, layout: Layout | None) -> Float[Array, " Q"]:
    """Sum over the observations of each task; ``x`` has one column where all tasks agree."""
    if layout is None:
        return jnp.broadcast_to(jnp.sum(x, axis=0), num_tasks)
    return jnp.zeros(num_tasks, x.dtype).at[layout.where.columns].add(jnp.ravel(x))
