# SPDX-License-Identifier: Apache-2.0
"""Tables, pictures, LOO and predictive checks of observations that are not Normal."""

from typing import Any, NamedTuple

import arviz_base
import arviz_plots
import arviz_stats
from known_draws import points_and_bars
from likelihood_cases import CASES, model_of
import numpy as np
import pytest
import xarray as xr

from jax import random

from numpyro.infer import MCMC, Predictive, log_likelihood

import numpyro_spikeslab as nss

# ArviZ has advice on discrete data, and on observations that matter a lot
pytestmark = pytest.mark.filterwarnings("ignore:.*(look binary|look discrete|shape parameter)")
PICTURES = {
    "logit": "plot_ppc_pava",
    "negative binomial of the mean": "plot_ppc_rootogram",
    "student": "plot_ppc_dist",
}


class Posteriors(NamedTuple):
    """The draws of chains and of a fit to the same data, in which two columns are equal."""

    name: str
    X: np.ndarray
    y: np.ndarray
    chains: xr.DataTree
    fit: xr.DataTree


FIRST, *OTHERS = PICTURES
ROWS = [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(scope="module", params=ROWS)
def posteriors(request: pytest.FixtureRequest) -> Any:
    case, rng = CASES[request.param], np.random.default_rng(3)
    X = rng.normal(size=(80, 4))
    X[:, 2] = X[:, 0]
    y = case.draw(1.8 * X[:, 0] - 1.8 * X[:, 1], rng)
    model = model_of(case)
    counts = {"num_warmup": 100, "num_samples": 300, "num_chains": 2}
    mcmc = MCMC(nss.PairedGibbs(model), **counts, chain_method="sequential", progress_bar=False)
    mcmc.run(random.key(0), X, y, extra_fields=("inclusion_probabilities.w",))
    replicate = Predictive(model, mcmc.get_samples(), return_sites=["y"])
    replicated = replicate(random.key(1), X)
    chains = arviz_base.from_numpyro(mcmc, log_likelihood=True, posterior_predictive=replicated)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    result = svi.run(random.key(2), 120, X, y, progress_bar=False)
    fit = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=(X, y))
    draws = {name: x.values for name, x in fit["posterior"].items()}
    density = log_likelihood(model, draws, X, y)["y"]
    dims = ("chain", "draw", "obs")
    fit["log_likelihood"] = xr.Dataset({"y": (dims, np.asarray(density)[None])})
    return Posteriors(
        request.param, X, y, chains, nss.add_variational_stats(fit, svi, result, (X, y))
    )


@pytest.mark.slow
def test_tables_are_those_of_the_posterior(posteriors):
    _, X, _, chains, fit = posteriors
    table, of_fit = nss.summary(chains), nss.summary(fit)
    # the equal columns take turns in chains, and the fit has one of them
    probs = table["inclusion"].to_numpy()
    assert np.all(abs(probs[[0, 2]] - 0.5) < 0.15) and probs[1] > 0.99 and probs[3] < 0.5
    assert table["r_hat"].max() < 1.05
    one, other = np.sort(of_fit["inclusion"].to_numpy()[[0, 2]])
    assert one < 0.3 and other > 0.9
    assert of_fit["alternatives"].tolist() == ["w[2]", "", "w[0]", ""]
    stats = fit["sample_stats"].to_dataset()
    shares = stats["credible_sets.w"].to_numpy()[:, [0, 2]]
    np.testing.assert_allclose(shares[np.isfinite(shares)], [0.5, 0.5], atol=0.1)
    sets = nss.credible_sets(chains, "w", X)
    assert {frozenset(members) for members in sets["members"]} >= {frozenset([0, 2])}
    # the bound of CAVI is one of the bound with the likelihood itself
    ratios, bound = stats["log_ratio"].to_numpy(), stats.attrs["bound"]
    assert bound < ratios.mean() + 4 * ratios.std() / len(ratios) ** 0.5 < bound + 3
    compared = nss.compare({"chains": chains, "fit": fit}, "w", reference="chains")
    assert compared.loc["fit", "bound"] == bound and np.isfinite(compared.loc["fit", "k_hat"])
    assert 0.3 < compared.loc["fit", "max_abs_error_inclusion"] < 0.7
    picture = nss.plot_inclusion({"chains": chains, "fit": fit})
    for method, each in enumerate((table, of_fit)):
        points, _ = points_and_bars(picture.get_target("w", {}), method)
        np.testing.assert_allclose(points[:, 0], each["inclusion"], atol=1e-3)


@pytest.mark.slow
def test_arviz_checks_predictions(posteriors):
    case, _, y, chains, fit = posteriors
    # the draws of a fit are independent, and are no chain
    loo = arviz_stats.loo(chains), arviz_stats.loo(fit, reff=1.0)
    assert abs(loo[0].elpd - loo[1].elpd) < 3 and all(0 < x.p < 8 for x in loo)
    replicated = chains["posterior_predictive"]["y"].to_numpy()
    assert replicated.shape == (2, 300, len(y))
    # the mean of the data is an ordinary one
    assert 0.01 < np.mean(replicated.mean(axis=-1) < y.mean()) < 0.99
    for name in (PICTURES[case], "plot_ppc_pit", "plot_loo_pit"):
        picture = getattr(arviz_plots, name)(chains, backend="matplotlib")
        assert picture.get_target("y", {}).has_data()
