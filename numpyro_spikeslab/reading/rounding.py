# SPDX-License-Identifier: Apache-2.0
"""In which precision flips and swaps of spikes have to be, judged from the data."""

from typing import Any
import warnings

import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.active_set import MAX_ROUNDING
from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.algebra.signal import signal_of
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.roles import NoiseRole, SlabRole

EPS = float(np.finfo(np.float32).eps)
# Rounding error times signal to noise ratio, above which draws of single pairs are off, too.
MAX_PAIR_ROUNDING = 0.25


def sweeps_of(reading: Any) -> Sweeps:
    """Decide in which precision sweeps have to be, and warn where the rest of a step is not exact.

    Sites without a role have generic values.
    """
    form = reading.form
    is_double = jnp.result_type(float) == np.float64
    is_fixed = form.likelihood.is_fixed
    if is_double or not form.is_design or not form.sets.alone.all() or not is_fixed:
        return Sweeps.AS_PROGRAM
    if not are_concrete((reading.problem.constants, reading.params)):
        return Sweeps.AS_REQUIRED
    noise, ratio, rounding = _ratios(reading)
    if max(EPS * ratio, rounding) > MAX_PAIR_ROUNDING:
        warnings.warn(
            f"The noise of {form.response!r}, {noise:.2g}, is close to the rounding errors of "
            "single precision, so inclusion probabilities may be wrong. Call "
            "`numpyro.enable_x64()` before the data become arrays of JAX.",
            stacklevel=2,
        )
    # draws of the noise may be somewhat smaller
    return Sweeps.DOUBLE if 2 * EPS * ratio**2 > MAX_ROUNDING else Sweeps.AS_PROGRAM


def _ratios(reading: Any) -> tuple[float, float, float]:
    """Estimate the noise, and beside it the largest signal and the rounding of the observations."""
    form, design, split = reading.form, reading.design, reading.split

    def arrays(values):
        at = reading.view(values | reading.params)
        relative = at.relative[:, 0]
        rows = () if design is not None else reading.design_at(values, relative).features
        y, scale = at.whitened, jnp.max(at.prior.variance) ** 0.5
        return rows, relative, y, at.sigma2[0] ** 0.5, at.rounding[0] ** 0.5, scale

    computed = jax.device_get(compiled(arrays, reading.generic, once=True))
    rows, relative, y, sigma, rounding, scale = computed
    rows = np.asarray(rows if design is None else design.features)[: form.size]
    covariates, outside = np.sqrt(relative)[None], rows
    if split is not None:
        covariates = np.concatenate([covariates, split.basis])
        outside = np.asarray(split.outside).reshape(-1, y.size)
    observed = relative > 0
    signal = signal_of(*(x[..., observed] for x in (rows, y, covariates)))
    noise = max(signal.noise, rounding / y.size**0.5)
    if not form.roles_of(NoiseRole):
        # that of generic values may be larger than what another kernel draws
        noise = min(noise, sigma) if form.free else sigma
    # a scale that is learned may be larger than all weights
    scale = 2 * signal.weight if form.roles_of(SlabRole) else scale
    length = np.sqrt(np.max(np.einsum("pn,pn->p", outside, outside)))
    ratio = max(scale * length, signal.length) / noise
    return float(noise), float(ratio), float(rounding / noise)
