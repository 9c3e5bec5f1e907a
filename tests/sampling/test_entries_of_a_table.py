# SPDX-License-Identifier: Apache-2.0
"""Samplers of entries of a table that is never made dense."""

import numpy as np
import pytest
from scipy.sparse import coo_array

import jax
from jax import random
from jax.experimental.sparse import BCOO
import jax.numpy as jnp

from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.pairs import Draw, Draws
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.reading.reader import Reader

KEY = random.key(0)
N, Q, M = 30, 8, 2


def data():
    """Entries of a table of two sparse factors, and the table with NaN."""
    rng = np.random.default_rng(0)
    W = 1.5 * rng.normal(size=(Q, M)) * (rng.random((Q, M)) < 0.6)
    table = rng.normal(size=(N, M)) @ W.T + 0.3 * rng.normal(size=(N, Q))
    filled = rng.random((N, Q)) < 0.7
    entries = coo_array((table[filled], np.nonzero(filled)), shape=(N, Q))
    return entries, np.where(filled, table, np.nan)


def views(values):
    model = nss.models.factor_analysis(M)
    readings = [Reader(model, "test")((Y,), {}) for Y in data()]
    return [reading.view({k: values[k] for k in reading.form.others}) for reading in readings]


def some_values():
    rng = np.random.default_rng(1)
    noise = jnp.asarray(rng.uniform(0.3, 1, Q))
    phi, W = (jnp.asarray(rng.normal(size=shape)) for shape in ((M, N), (Q, M)))
    return {"noise": noise, "inclusion": jnp.array(0.4), "slab_scale": jnp.array(1.3)}, phi, W


def test_draws_of_the_weights_are_those_of_the_table(x64):
    values, phi, W = some_values()
    before, update = Draws.of(jnp.ones_like(W), W), Draw(logistic_and_normal(KEY, W))
    of_entries, of_table = (at.sweep((phi, None), before, update)[0] for at in views(values))
    for one, other in zip(of_entries, of_table, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
    squares = [at.squares(at.residual(W, phi)) for at in views(values)]
    np.testing.assert_allclose(*squares, rtol=1e-10)


@pytest.mark.exhaustive
def test_chains_begin_at_a_fit(x64):
    Y, _ = data()
    model = nss.models.factor_analysis(M)
    guide = nss.PairedGuide(model)
    result = nss.CAVI(model, guide).run(KEY, 100, Y, progress_bar=False)
    kernel = nss.LatentGibbs(model, accelerate=0.0)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=400, progress_bar=False)
    mcmc.run(KEY, Y, init_params=guide.to_init_params(result.params, Y))
    draws = mcmc.get_samples()
    mean, variance = guide.predict(result.params, Y)
    # the fit's mean is within the spread of the draws, which its own variance is a part of
    away = (np.mean(draws["f"], axis=0) - mean) / np.std(draws["f"], axis=0)
    assert np.mean(abs(away) < 1) > 0.9 and np.all(variance > 0)


def test_entries_that_are_traced_are_named(x64):
    """Without their rows and columns it is not known that the location is that of a table."""
    entries, _ = data()
    where = np.stack(entries.coords, axis=1)
    model = nss.models.factor_analysis(M)
    for kernel in (nss.LatentGibbs(model, accelerate=0.25), nss.PairedGibbs(model)):

        def start(values, where, kernel=kernel):
            table = BCOO((values, where), shape=(N, Q))
            return kernel.init(KEY, 10, None, (table,), {})

        with pytest.raises(ValueError, match=r"data are traced.*bind indices, entries"):
            jax.jit(start)(entries.data, where)
