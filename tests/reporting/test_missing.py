# SPDX-License-Identifier: Apache-2.0
"""Missing responses are left out of leave-one-out cross-validation as the documentation says."""

import arviz_base
import arviz_stats
import numpy as np
import pytest
from scipy.stats import norm

import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import log_likelihood

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
MU = RNG.normal(scale=0.2, size=(2, 200, 3)).astype(np.float32)
Y = RNG.normal(size=(20, 3)).astype(np.float32)
Y[3:9, 1] = np.nan


def model(Y):
    """Means of three tasks, with responses that are missing as in ``models.mtmkl``."""
    with numpyro.plate("task", 3):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
    observed = ~jnp.isnan(Y)
    with (
        numpyro.plate("point", 20, dim=-2),
        numpyro.plate("task", 3, dim=-1),
        handlers.mask(mask=observed),
    ):
        numpyro.sample("Y", dist.Normal(mu, 1), obs=jnp.where(observed, Y, 0.0))


def with_log_likelihood():
    values = log_likelihood(model, {"mu": MU}, Y, batch_ndims=2)["Y"]
    return arviz_base.from_dict(
        {"posterior": {"mu": MU}, "log_likelihood": {"Y": np.asarray(values)}},
        dims={"mu": ["task"], "Y": ["point", "task"]},
    )


def test_missing_responses_are_left_out():
    chains = with_log_likelihood()
    missing = np.isnan(Y)
    assert (chains["log_likelihood"]["Y"].values[..., missing] == 0).all()
    with pytest.raises(ValueError, match="All tail values are the same"):
        arviz_stats.loo(chains)

    # the two lines of docs/reference/diagnostics.md
    entries = chains["log_likelihood"]["Y"].stack(entry=["point", "task"])
    chains["log_likelihood"] = entries[..., ~np.isnan(Y).ravel()].to_dataset()

    found = arviz_stats.loo(chains, pointwise=True)
    assert found.n_data_points == np.sum(~missing)
    # leave-one-out densities by importance sampling, without smoothing
    scores = norm.logpdf(Y, MU[:, :, None])[..., ~missing]
    expected = -np.log(np.mean(np.exp(-scores), axis=(0, 1)))
    np.testing.assert_allclose(found.elpd_i, expected, atol=0.01)
    assert found.elpd == pytest.approx(expected.sum(), abs=0.1)
