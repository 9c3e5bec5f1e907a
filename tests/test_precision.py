# SPDX-License-Identifier: Apache-2.0
"""Matrix products are computed in full precision even if the program's default is lower.

JAX refuses lower precision on CPUs, so a product that takes the default fails here.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import arviz_base
import numpy as np
import pytest
from scipy import sparse
from tinygp import kernels
import truth

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.precision import full_precision

X = np.linspace(0.0, 3.0, 9)
Y = np.sin(np.outer(X, [1, 2, 3])) + 0.1 * np.random.default_rng(0).normal(size=(9, 3))
GAPS = np.where(np.arange(27).reshape(9, 3) % 5 == 0, np.nan, Y)
SMOOTH = nss.models.mtmkl(kernels.ExpSquared(1.0), 2)
STATES = nss.models.mtmkl(kernels.quasisep.Matern32(1.0), 2)
WHITE = nss.models.probabilistic_pca(2)


pytestmark = pytest.mark.filterwarnings("ignore:CAVI.run ended after step 2 at temperature")


@pytest.fixture
def rounding() -> Iterator[None]:
    """A program whose products are rounded by default."""
    if jax.default_backend() != "cpu":
        pytest.skip("only CPUs refuse to round")
    with jax.default_matmul_precision("TF32_TF32_F32"):
        yield
        with pytest.raises(ValueError, match="TF32_TF32_F32"):
            jax.jit(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 2)))


def fit(model: Any, *args: Any, **options: Any) -> tuple[nss.CAVI, Any]:
    svi = nss.CAVI(model, nss.PairedGuide(model), **options)
    state = svi.init(random.key(0), *args)
    svi.evaluate(svi.update(state, *args)[0], *args)
    return svi, svi.run(random.key(1), 2, *args, progress_bar=False)


def ask(guide: Any, params: dict[str, Any], *args: Any) -> None:
    """Call the summaries of a guide."""
    guide.posterior_mean(params, *args)
    guide.median(params, *args)
    guide.quantiles(params, [0.1, 0.9], *args)
    guide.sample_posterior(random.key(2), params, *args, sample_shape=(2,))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("latent hyperparameters", marks=pytest.mark.exhaustive),
        pytest.param("shared features with a mask", marks=pytest.mark.slow),
        pytest.param("latent design", marks=pytest.mark.exhaustive),
        pytest.param("latent hyperparameters of tasks", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("rounding")
def test_fits_of_known_features(name):
    case = truth.CASES[name]()
    svi, result = fit(case.model, *case.args, num_restarts=2)
    ask(svi.guide, result.params, *case.args)
    svi.guide.to_init_params(result.params, *case.args)
    if name in ("latent hyperparameters", "latent design"):
        svi.guide.credible_sets(result.params, *case.args)


@pytest.mark.parametrize(
    ("model", "args", "options"),
    [
        pytest.param(SMOOTH, (X, GAPS), {}, id="gaps", marks=pytest.mark.slow),
        pytest.param(WHITE, (GAPS,), {}, id="white", marks=pytest.mark.slow),
        pytest.param(SMOOTH, (X, Y), {"plain": True}, id="plain", marks=pytest.mark.exhaustive),
        pytest.param(STATES, (X, GAPS), {}, id="state-space", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("rounding")
def test_fits_of_latent_functions(model, args, options):
    svi, result = fit(model, *args, **options)
    ask(svi.guide, result.params, *args)
    svi.guide.predict(result.params, *args)
    if model is WHITE:
        svi.guide.transform(result.params, *args, Y_new=Y)
    else:
        svi.guide.predict(result.params, *args, X_new=X + 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
def test_fits_of_ratings():
    rows, columns = np.nonzero(~np.isnan(GAPS))
    table = sparse.coo_array((GAPS[rows, columns], (rows, columns)), shape=GAPS.shape)
    svi, result = fit(WHITE, table)
    svi.guide.predict(result.params, table)


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
def test_fits_of_batches():
    svi = nss.CAVI(SMOOTH, nss.PairedGuide(SMOOTH), plain=True, num_tasks=30)
    state = svi.init(random.key(0), X, Y)
    svi.evaluate(svi.update(state, X, Y)[0], X, Y)


@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (partial(nss.PairedGibbs, truth.hyper_model), truth.hyper_case().args),
        pytest.param(partial(nss.mtmkl_kernel, SMOOTH), (X, GAPS), marks=pytest.mark.slow),
    ],
    ids=["pairs", "functions"],
)
@pytest.mark.usefixtures("rounding")
def test_chains(kernel, args):
    mcmc = MCMC(kernel(), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args)


@pytest.mark.usefixtures("rounding")
def test_statistics_of_a_fit():
    case = truth.fixed_case()
    svi, result = fit(case.model, *case.args)
    draws = svi.guide.sample_posterior(random.key(0), result.params, *case.args, sample_shape=(4,))
    data = arviz_base.from_dict({"posterior": draws}, sample_dims=["sample"])
    nss.add_variational_stats(data, svi, result, case.args)


def test_the_precision_of_the_caller_stays():
    """Calls are made within calls, and one after the other."""

    @full_precision
    def inner():
        return jax.config.jax_default_matmul_precision

    @full_precision
    def outer():
        return inner(), inner(), jax.config.jax_default_matmul_precision

    with jax.default_matmul_precision("bfloat16"):
        assert outer() == ("float32",) * 3
        assert jax.config.jax_default_matmul_precision == "bfloat16"
