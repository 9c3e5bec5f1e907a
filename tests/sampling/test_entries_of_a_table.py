# SPDX-License-Identifier: Apache-2.0
"""Samplers of entries of a table that is never made dense."""

import arviz_base
import numpy as np
import pytest
from scipy.sparse import coo_array

import jax
from jax import random
from jax.experimental.sparse import BCOO
import jax.numpy as jnp

from numpyro.infer import MCMC, NUTS, Gibbs

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.sampling.latent_step import draw_rows
from numpyro_spikeslab.sampling.paired_gibbs import draw_tasks
from numpyro_spikeslab.sampling.scale_draws import squares_given

KEY = random.key(0)
N, Q, M = 30, 8, 2
CHAINS = dict(chain_method="sequential", progress_bar=False)


def data():
    """Entries of a table of two sparse factors, and the table with NaN."""
    rng = np.random.default_rng(0)
    W = 1.5 * rng.normal(size=(Q, M)) * (rng.random((Q, M)) < 0.6)
    table = rng.normal(size=(N, M)) @ W.T + 0.3 * rng.normal(size=(N, Q))
    seen = rng.random((N, Q)) < 0.7
    return coo_array((table[seen], np.nonzero(seen)), shape=(N, Q)), np.where(seen, table, np.nan)


def views(values):
    model = nss.models.factor_analysis(M)
    readings = [Reader(model, "test")((Y,), {}) for Y in data()]
    return [reading.view({k: values[k] for k in reading.form.others}) for reading in readings]


def some_values():
    rng = np.random.default_rng(1)
    noise = jnp.asarray(rng.uniform(0.3, 1, Q))
    return {"noise": noise, "inclusion": jnp.array(0.4), "slab_scale": jnp.array(1.3)}, rng


@pytest.mark.slow
def test_draws_of_the_weights_are_those_of_the_table(x64):
    values, rng = some_values()
    phi, W = (jnp.asarray(rng.normal(size=shape)) for shape in ((M, N), (Q, M)))
    of_entries, of_table = (draw_tasks(KEY, at, phi, W) for at in views(values))
    for one, other in zip(of_entries, of_table, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
    squares = [squares_given(at, phi, W) for at in views(values)]
    np.testing.assert_allclose(*squares, rtol=1e-10)


@pytest.mark.slow
def test_draws_of_the_rows_have_the_moments_of_their_conditional(x64):
    values, rng = some_values()
    phi, W = (jnp.asarray(rng.normal(size=shape)) for shape in ((M, N), (Q, M)))
    at, _ = views(values)
    table = data()[1]
    size = 20_000
    draw = jax.jit(jax.vmap(lambda key: draw_rows(key, at, phi, W)))
    draws = np.asarray(draw(random.split(KEY, size)))
    for n in range(N):
        seen = ~np.isnan(table[n])
        A = W[seen] / values["noise"][seen][:, None]
        covariance = np.linalg.inv(np.eye(M) + A.T @ A)
        mean = covariance @ A.T @ (table[n, seen] / values["noise"][seen])
        own = draws[:, :, n] - mean
        sd = np.sqrt(np.diag(covariance))
        # 60 means and 120 products at five standard errors: a false alarm in 10,000 keys
        assert np.all(abs(own.mean(axis=0)) < 5 * sd / np.sqrt(size))
        spread = np.sqrt((covariance**2 + np.outer(sd, sd) ** 2) / size)
        assert np.all(abs(own.T @ own / size - covariance) < 5 * spread)


@pytest.mark.exhaustive
def test_chains_begin_at_a_fit_and_go_to_arviz(x64):
    Y, _ = data()
    model = nss.models.factor_analysis(M)
    guide = nss.PairedGuide(model)
    result = nss.CAVI(model, guide).run(KEY, 100, Y, progress_bar=False)
    kernel = nss.mtmkl_kernel(model, accelerate=0.0)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=200, num_chains=2, **CHAINS)
    mcmc.run(KEY, Y, init_params=guide.to_init_params(result.params, Y, num_chains=2))
    draws = mcmc.get_samples()
    mean, variance = guide.predict(result.params, Y)
    # the fit's mean is within the spread of the draws, which its own variance is a part of
    away = (np.mean(draws["f"], axis=0) - mean) / np.std(draws["f"], axis=0)
    assert np.mean(abs(away) < 1) > 0.9 and np.all(variance > 0)
    dt = arviz_base.from_numpyro(mcmc, log_likelihood=True)
    assert dt.posterior["f"].dims == ("chain", "draw", "entry")
    assert dt.log_likelihood["Y"].sizes["entry"] == Y.nnz


@pytest.mark.exhaustive
def test_kernels_run_alone_and_beside_others():
    Y, _ = data()
    model = nss.models.factor_analysis(M)
    composite = Gibbs(
        [
            (nss.PairedGibbs(model), nss.paired_sites),
            (nss.LatentGibbs(model), nss.latent_sites),
            (NUTS(model), None),
        ]
    )
    for kernel in (nss.mtmkl_kernel(model), composite):
        # from a draw of the prior the composite has arrived after some 500 steps
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=300, progress_bar=False)
        mcmc.run(KEY, Y)
        draws = mcmc.get_samples()
        assert draws["phi"].shape == (300, M, N) and draws["f"].shape == (300, Y.nnz)
        residual = Y.data - np.mean(draws["f"], axis=0)
        assert np.std(residual) < 0.5 * np.std(Y.data)


def test_entries_that_are_traced_are_named(x64):
    """Without their rows and columns it is not known that the location is that of a table."""
    entries, _ = data()
    where = np.stack(entries.coords, axis=1)
    model = nss.models.factor_analysis(M)
    for kernel in (nss.mtmkl_kernel(model), nss.PairedGibbs(model)):

        def start(values, where, kernel=kernel):
            table = BCOO((values, where), shape=(N, Q))
            return kernel.init(KEY, 10, None, (table,), {})

        with pytest.raises(ValueError, match=r"data are traced.*bind indices, entries"):
            jax.jit(start)(entries.data, where)
