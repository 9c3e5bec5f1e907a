# SPDX-License-Identifier: Apache-2.0
"""Comparison of readings with NumPyro, at any values of all sites."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.util import log_density

from numpyro_spikeslab.reading.reader import Reader, Reading


def draw_values(model: Callable, args: tuple, kwargs: dict, seed: int) -> dict[str, Any]:
    """Draw values of all latent sites and params."""
    seeded = handlers.seed(model, random.key(seed))
    seeded = handlers.substitute(seeded, substitute_fn=init_to_uniform)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "param" or (site["type"] == "sample" and not site["is_observed"])
    }


def log_joint(reading: Reading, values: dict[str, Any]) -> float:
    """Compute the log joint density by the arrays of a view."""
    form = reading.form
    spikes, slabs = (
        np.concatenate([np.ravel(values[getattr(pair, part)]) for pair in form.pairs])
        for part in ("spike", "slab")
    )
    view = reading.view(values, form.split(jnp.asarray(spikes * slabs), "{}"))
    precision = np.broadcast_to(view.precision, view.Y.shape)
    likelihood = -0.5 * np.sum(precision * view.Y**2) - view.log_scale
    log_odds, variance = map(np.ravel, view.prior)
    spike_prior = np.sum(spikes * log_odds - np.logaddexp(0, log_odds))
    slab_prior = np.sum(stats.norm.logpdf(slabs, 0.0, np.sqrt(variance)))
    functions = 0.0 if form.functions is None else log_prior_of_functions(reading, values, view)
    # a view leaves these sites to their priors
    names = view.priors.keys() & {*form.kernels, *(role.site for role in form.roles_with_mode)}
    others = sum(float(jnp.sum(view.priors[name].log_prob(values[name]))) for name in names)
    return float(likelihood + spike_prior + slab_prior + view.log_density + others + functions)


def log_prior_of_functions(reading: Reading, values: dict[str, Any], view: Any) -> float:
    prior = reading.functions.prior(view.priors)
    theta = reading.functions.theta(values)
    phi = np.asarray(values[reading.form.functions])
    total = 0.0
    for m, (row, x) in enumerate(zip(theta, phi - prior.mean, strict=True)):
        covariance = prior.covariance(m, row)
        L = covariance.root()
        half = covariance.solve_lower(L, x)
        total -= 0.5 * (half @ half + x.size * np.log(2 * np.pi)) + covariance.half_logdet(L)
    return float(total)


def whitened_move(reading: Reading, values: dict[str, Any], weights: np.ndarray) -> np.ndarray:
    """Compute the part of weights in the whitened location by running the model."""
    form = reading.form
    zero, moved = (
        reading.view(values, form.split(jnp.asarray(w), "{}")) for w in (0 * weights, weights)
    )
    return np.asarray(np.sqrt(zero.relative) * (zero.Y - moved.Y))


def assert_agrees(
    model: Callable, *args: Any, draws: int = 3, rtol: float = 1e-9, **kwargs: Any
) -> Reading:
    """Read a model, compare, and return the reading."""
    return compare(Reader(model, "test"), args, kwargs, draws, rtol)


def compare(reader: Reader, args: tuple, kwargs: dict, draws: int, rtol: float) -> Reading:
    """Compare what a reader has read with its model, and return the reading."""
    reading, model = reader(args, kwargs), reader.model
    rng = np.random.default_rng(0)
    for seed in range(draws):
        # what is missing may have no location
        with numpyro.validation_enabled(False):
            values = draw_values(model, args, kwargs, seed)
            expected = float(log_density(model, args, kwargs, values)[0])
        np.testing.assert_allclose(
            log_joint(reading, values), expected, rtol=rtol, err_msg="log joint density"
        )
        weights = rng.normal(size=reading.form.size)
        moved = whitened_move(reading, values, weights)
        np.testing.assert_allclose(
            by_design(reading, values, weights), moved, atol=rtol * (1 + np.max(np.abs(moved)))
        )
        check_roles(reading, values)
    return reading


def by_design(reading: Reading, values: dict[str, Any], weights: np.ndarray) -> np.ndarray:
    """Compute the same by the arrays that inference uses."""
    form = reading.form
    if form.is_design:
        design = reading.design_at(values, reading.view(values).relative[:, 0])
        rows = np.asarray(design.rows).reshape(-1, form.num_obs)[: form.size]
        return (weights @ rows)[:, None]
    features = reading.features if form.shares_features else values[form.functions]
    relative = np.asarray(reading.view(values).relative)
    moved = (weights.reshape(form.shape) @ np.asarray(features)).T
    return np.sqrt(relative) * moved


def check_roles(reading: Reading, values: dict[str, Any]) -> None:
    """Assert that a view has the values of roles where their indices point."""
    view = reading.view(values)
    parts = {
        "noise": np.sqrt(view.sigma2),
        "inclusion": np.asarray(jax.nn.sigmoid(view.prior.log_odds)).ravel(),
        "slab": np.sqrt(view.prior.variance).ravel(),
    }
    for role in reading.form.roles:
        entries = reading.indices[role.site].entries
        index = np.zeros(1, int) if entries is None else np.ravel(entries)
        value = np.ravel(values[role.site])
        used = index < value.size
        assert used.any(), role
        part = np.broadcast_to(parts[role.part], index.shape)
        np.testing.assert_allclose(part[used], value[index[used]], rtol=1e-6, err_msg=role.site)
