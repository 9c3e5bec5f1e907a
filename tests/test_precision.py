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
from numpyro_spikeslab.support.precision import full_precision

X = np.linspace(0.0, 3.0, 9)
Y = np.sin(np.outer(X, [1, 2, 3])) + 0.1 * np.random.default_rng(0).normal(size=(9, 3))
GAPS = np.where(np.arange(27).reshape(9, 3) % 5 == 0, np.nan, Y)
SMOOTH = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2)
STATES = nss.models.mtmkl([kernels.quasisep.Matern32(1.0)] * 2)
WHITE = nss.models.factor_analysis(2, shared_noise=True)


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


ROWS, COLUMNS = np.nonzero(~np.isnan(GAPS))
TABLE = sparse.coo_array((GAPS[ROWS, COLUMNS], (ROWS, COLUMNS)), shape=GAPS.shape)


@pytest.mark.parametrize(
    ("model", "args", "options"),
    [
        ("latent hyperparameters", (), {"num_restarts": 2}),
        ("shared features with a mask", (), {"num_restarts": 2}),
        ("latent design", (), {"num_restarts": 2}),
        pytest.param(SMOOTH, (X, GAPS), {}, id="gaps"),
        pytest.param(WHITE, (GAPS,), {}, id="white"),
        pytest.param(WHITE, (TABLE,), {}, id="ratings"),
        pytest.param(SMOOTH, (X, Y), {"plain": True}, id="plain"),
        pytest.param(STATES, (X, GAPS), {}, id="state-space"),
    ],
)
@pytest.mark.usefixtures("rounding")
def test_fits(model, args, options):
    name = model if isinstance(model, str) else ""
    if name:
        case = truth.CASES[name]()
        model, args = case.model, case.args
    svi, result = fit(model, *args, **options)
    guide, params = svi.guide, result.params
    guide.posterior_mean(params, *args)
    guide.median(params, *args)
    guide.quantiles(params, [0.1, 0.9], *args)
    guide.sample_posterior(random.key(2), params, *args, sample_shape=(2,))
    if name:
        guide.to_init_params(params, *args)
        if name in ("latent hyperparameters", "latent design"):
            guide.credible_sets(params, *args)
        return
    guide.predict(params, *args)
    if model is not WHITE:
        guide.predict(params, *args, X_new=X + 0.1)
    elif args[0] is GAPS:
        guide.transform(params, *args, Y_new=Y)


@pytest.mark.usefixtures("rounding")
def test_fits_of_batches():
    svi = nss.CAVI(SMOOTH, nss.PairedGuide(SMOOTH), plain=True, num_tasks=30)
    state = svi.init(random.key(0), X, Y)
    svi.evaluate(svi.update(state, X, Y)[0], X, Y)


@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (partial(nss.PairedGibbs, truth.hyper_model), truth.hyper_case().args),
        (partial(nss.LatentGibbs, SMOOTH, accelerate=0.25), (X, GAPS)),
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
    inner = full_precision(lambda: jax.config.jax_default_matmul_precision)
    outer = full_precision(lambda: (inner(), inner(), jax.config.jax_default_matmul_precision))
    with jax.default_matmul_precision("bfloat16"):
        assert outer() == ("float32",) * 3
        assert jax.config.jax_default_matmul_precision == "bfloat16"
