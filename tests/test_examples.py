# SPDX-License-Identifier: Apache-2.0
"""The data set that comes with the package, and the examples."""

from importlib import import_module
import json
from pathlib import Path
import signal
import subprocess
import sys
import time
from types import ModuleType

import arviz_stats
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats
import truth
from truth import likelihood_cases

import jax

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import RegressionData, boston_housing

pytestmark = pytest.mark.usefixtures("x64")
EXAMPLES = Path(__file__).parent.parent / "examples"


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the module of an example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return import_module(name)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("boston_housing", monkeypatch)


def test_boston_housing_is_standardised_and_labelled():
    X, y, features = boston_housing()
    assert X.shape == (456, 13) and y.shape == (456,) and len(set(features)) == 13
    np.testing.assert_allclose(X.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(X.std(axis=0), 1.0, rtol=1e-12)
    np.testing.assert_allclose([y.mean(), y.std()], [0.0, 1.0], atol=1e-12)
    # by far the strongest two, with their known signs
    correlation = dict(zip(features, X.T @ y / len(y), strict=True))
    assert sorted(correlation, key=lambda name: -abs(correlation[name]))[:2] == ["lstat", "rm"]
    assert correlation["lstat"] < -0.7 < 0.6 < correlation["rm"]


def test_table_1(example):
    data = boston_housing()
    exact = example.exact_posterior(data.X, data.y)
    expected = truth.enumerate_models(truth.regression(data.X, data.y, 0.1**0.5, 0.25, 1.0))
    for name in ("log_evidence", "mean", "inclusion"):
        np.testing.assert_allclose(getattr(exact, name), getattr(expected, name), rtol=1e-7)
    assert abs(exact.log_evidence + 548.91) < 0.005
    fits = example.fit_families(data, exact, num_starts=60)
    for kind in ("soft", "extreme"):
        mf, pmf, annealed = (fits[name][kind] for name in ("MF", "PMF", "annealed PMF"))
        assert annealed.error.max() < 0.001
        assert 0.1 < pmf.error.mean() < 0.3 and pmf.error.max() < 0.5
        assert mf.error.mean() > 3 * pmf.error.mean()
        # the bounds are bounds, and the best of PMF is what annealing finds every time
        for fit in (mf, pmf, annealed):
            assert fit.bounds.max() < exact.log_evidence
        np.testing.assert_allclose(annealed.bounds[:, -1], pmf.bounds[:, -1].max(), atol=1e-4)
        np.testing.assert_allclose(annealed.bounds[:, -1], -552.23, atol=0.01)
    assert fits["MF"]["extreme"].error.mean() > 1.5 > fits["MF"]["soft"].error.mean()
    table = example.table_1(fits)
    assert table.index.tolist() == ["MF, paper", "PMF, paper", "MF", "PMF", "annealed PMF"]
    assert not table.isna().any(axis=None)
    figures = [example.plot_errors(fits), example.plot_bounds(fits, exact)]
    assert [len(figure.axes) for figure in figures] == [1, 3]
    plt.close("all")


def test_digits_are_told_apart(monkeypatch):
    """Three classes and two sets of features, 20 labelled digits of each class."""
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    folder = EXAMPLES.parent.parent / "shared" / "data" / "mfeat"
    if not folder.exists():
        pytest.skip("the multiple features of digits are not here")
    example = imported("mfeat_classification", monkeypatch)
    whole = example.load(folder)
    assert whole.X.shape == (2000, 649) and len(whole.sets) == 6
    rows = whole.classes < 3
    digits = example.Digits({k: whole.sets[k][rows] for k in ("fou", "zer")}, whole.classes[rows])
    train, test = example.split(digits.classes, 0)
    assert train.size == 60 and not set(train) & set(test)
    for bernoulli in (False, True):
        scores = example.mtmkl(digits, train, test, bernoulli)
        measures = example.measures(digits.classes[test], scores)
        assert measures["accuracy"] > 0.93 and measures["AUC"] > 0.98
    # uninformative scores
    random_scores = np.random.default_rng(0).normal(size=(test.size, 3))
    assert example.measures(digits.classes[test], random_scores)["BEP"] < 0.45


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    return imported("classes", monkeypatch)


def test_models_of_classes_are_summed(classes):
    case = likelihood_cases.CASES["logit"]
    X, y = likelihood_cases.data_of(case)
    expected = likelihood_cases.truth_of(case, X, y).inclusion
    table = classes.Table(X, y, ["a", "b", "c"])
    prior = likelihood_cases.INCLUSION, likelihood_cases.SLAB
    # without an intercept, as there
    inclusion = classes.sum_over_models(table, 4000, *prior, intercept_scale=1e-4)
    np.testing.assert_allclose(inclusion, expected, atol=0.01)


@pytest.mark.exhaustive
def test_tumours_are_told_apart(classes):
    table = classes.cancer()
    assert table.X.shape == (569, 30) and table.y.sum() == 212
    losses = classes.held_out_losses(table, 500).mean()
    assert losses["PairedGibbs"] < losses["CAVI"] < 0.13 < 0.6 < losses["class shares"]
    assert losses["PairedGibbs"] < losses["L1"] + 0.01


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:There are not enough devices")
def test_chains_of_the_multi_task_model_agree_and_are_calibrated(monkeypatch):
    """On the data set on which this is hardest; four chains take minutes."""
    example = imported("toy_sampling", monkeypatch)
    toy = example.toy_multioutput(3)
    chains, _, fits, ranks = example.compare(toy, 3)
    errors = {k: np.sum((fit.mean - toy.Y)[~toy.observed] ** 2) for k, fit in fits.items()}
    assert errors["Gibbs"] < 1.1 * errors["PMF"]
    inside = example.calibration(ranks).loc["Gibbs", "in 90% intervals"]
    assert 0.85 < inside < 0.95
    assert example.convergence(chains).loc["f", "R-hat"] < 1.05
    assert example.active_functions(chains)[4] > 0.8


def test_visits_are_made_in_the_shape_of_the_real_ones(monkeypatch, tmp_path):
    counts = imported("counts", monkeypatch)
    made = counts.load(tmp_path / "nothing.csv")
    assert made.X.shape == (4406, 17) and made.y.shape == (4406,) and made.y.min() == 0
    np.testing.assert_allclose([made.X.mean(), made.X.std(ddof=0)], [[0] * 17, [1] * 17], atol=1e-9)
    if not counts.FILE.exists():
        pytest.skip("the visits to doctors are not here")
    real = counts.load()
    assert list(real.X) == list(made.X) and real.X.shape == made.X.shape
    assert abs(real.y.mean() - 5.774) < 1e-3 and np.mean(real.y == 0) == 683 / 4406


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_counts_with_much_spread_are_no_poisson_ones(monkeypatch):
    counts = imported("counts", monkeypatch)
    visits = counts.planted(0, 1000)
    chains = {
        model.__name__: counts.sampled(model, visits, 200)
        for model in (counts.poisson, counts.negative_binomial)
    }
    elpd = [arviz_stats.loo(draws).elpd for draws in chains.values()]
    assert elpd[1] - elpd[0] > 300
    tables = [nss.summary(draws) for draws in chains.values()]
    # the standard deviation of the posterior is 0.06
    assert abs(tables[1].loc["concentration", "mean"] - 1.2) < 0.25
    strong = ["w[chronic conditions]", "w[hospital stays]"]
    assert all((table.loc[strong, "inclusion"] > 0.9).all() for table in tables)
    # what a Poisson cannot explain by chance it explains by covariates
    number = [table["inclusion"].sum() for table in tables]
    assert number[0] > number[1] + 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_a_few_outliers_decide_by_a_normal_likelihood_alone(monkeypatch):
    outliers = imported("outliers", monkeypatch)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4))
    y = 0.25 * X[:, 0] + 0.3 * rng.normal(size=200) + 4 * (X[:, 1] > 1.8)
    data = RegressionData(X, y, ["effect", "of outliers", "none", "none either"])
    chains = [outliers.sampled(model, data, 300) for model in (outliers.normal, outliers.student)]
    elpd = [arviz_stats.loo(draws).elpd for draws in chains]
    assert elpd[1] - elpd[0] > 50
    tables = [nss.summary(draws) for draws in chains]
    assert tables[1].loc["df", "mean"] < 4 and tables[1].loc["w[effect]", "inclusion"] > 0.99
    by_outliers = [table.loc["w[of outliers]", "inclusion"] for table in tables]
    assert by_outliers[0] > 0.99 and by_outliers[1] < 0.6


@pytest.mark.exhaustive
def test_effects_are_mapped_from_statistics(monkeypatch):
    """Of 5,000 people instead of 50,000, with effects three times as large."""
    example = imported("summary_statistics", monkeypatch)
    monkeypatch.setattr(example, "EFFECTS", {"rs20": 0.15, "rs50": -0.15})
    study = example.made(0, 5000, 80)
    p = example.log_p(study.z)
    np.testing.assert_allclose(p[:5], -np.log10(2 * stats.norm.sf(abs(study.z[:5]))))
    dt = nss.sparse_regression_from_statistics(
        jax.random.key(0), z=study.z, R=study.R, n=study.n, expected_size=2.0
    )
    sets = dt["summary"]["credible_set"].to_series()
    assert set(sets[["rs20", "rs50"]]) == {0, 1} and sum(sets >= 0) < 10


@pytest.mark.exhaustive
def test_a_level_that_drifts_is_not_explained_by_series_that_drift(monkeypatch):
    example = imported("time_series", monkeypatch)
    series = example.made()
    draws = example.sampled(example.structural, series, 300)
    inclusion = nss.summary(draws, "w", round_to=None)["inclusion"].to_numpy()
    used = series.X.columns.isin(series.used)
    assert inclusion[used].min() > 0.99 and inclusion[~used].max() < 0.3
    # the weights themselves, to three posterior standard deviations, and the level up to a constant
    w = draws["posterior"]["w"].stack(draws=("chain", "draw")).values[used]
    assert np.all(abs(w.mean(axis=1) - [0.6, -0.5]) < 3 * w.std(axis=1))
    level = example.level_of(draws, series).mean(axis=0)
    error = (level - level.mean()) - (series.level - series.level.mean())
    assert error.std() < 0.5 * series.level.std()


@pytest.mark.exhaustive
def test_a_pathway_makes_genes_more_likely_to_matter(monkeypatch):
    example = imported("annotations", monkeypatch)
    genes = example.made(0, 150, 100)
    draws = example.sampled(example.annotated, genes, 300)
    table = nss.summary(draws, ["level", "slope"])
    assert table.loc["slope[pathway]", "mean"] > 1 and table["r_hat"].max() < 1.1
    scores = example.scores(draws, genes)
    assert scores["found"] > scores["effects"] / 3 and scores["wrong"] <= 2


@pytest.fixture
def denoise(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    return imported("denoise", monkeypatch)


@pytest.mark.parametrize("shape", [(11, 9), (11, 9, 3)])
def test_blocks_make_their_image(denoise, shape):
    image = np.random.default_rng(0).normal(size=shape)
    blocks = denoise.blocks_of(image)
    assert blocks.shape == (64 * image[0, 0].size, 4 * 2)
    fourth = np.moveaxis(blocks[:, 3].reshape(-1, 8, 8), 0, -1)
    np.testing.assert_array_equal(fourth, image[1:9, 1:9].reshape(8, 8, -1))
    np.testing.assert_allclose(denoise.image_of(blocks, np.arange(1.0, 9), shape), image)
    # the pixel in the corner is in one block, its neighbour in two with weights 1 and 3
    other = denoise.image_of(blocks + np.arange(8), np.array([1, 3] * 4), shape) - image
    np.testing.assert_allclose(other[0, :2].reshape(2, -1)[:, 0], [0.0, 0.75], atol=1e-12)


@pytest.mark.exhaustive
def test_an_image_is_completed(monkeypatch):
    """In single precision; a dense start, or one that copies the observed pixels, fails."""
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    jax.config.update("jax_enable_x64", False)
    inpaint = imported("inpaint", monkeypatch)
    photograph = inpaint.photograph()[60:124, 20:84]
    observed = inpaint.without(photograph, 0.8, seed=1)
    missing = np.isnan(observed)
    fit = inpaint.inpaint(observed)
    np.testing.assert_array_equal(fit.image[~missing], photograph[~missing])
    guess = np.where(missing, np.nanmean(observed, axis=(0, 1)), observed)
    assert inpaint.psnr(fit.image, photograph) > inpaint.psnr(guess, photograph) + 6
    assert 1 < np.mean(fit.sizes) < 10
    # the least certain pixels have the largest errors
    error, order = abs(fit.image - photograph)[missing], np.argsort(fit.sd[missing])
    quarter = len(order) // 4
    assert np.mean(error[order[-quarter:]]) > 2 * np.mean(error[order[:quarter]])
    assert len(inpaint.plot(photograph, observed, fit).axes) == 4
    plt.close("all")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["white", "exponential"])
def test_an_image_is_denoised(denoise, monkeypatch, kernel):
    """In single precision, as users do."""
    jax.config.update("jax_enable_x64", False)
    monkeypatch.setattr(denoise, "NUM_GROUPS", 30)
    monkeypatch.setattr(denoise, "NUM_STEPS", 30)
    photograph = denoise.photograph()[60:124, 20:84]
    noisy = photograph + 25 * np.random.default_rng(1).normal(size=photograph.shape)
    before = denoise.psnr(noisy, photograph)
    if kernel == "exponential":
        exponential = denoise.Exp(8.0, distance=denoise.L2Distance())
        image = denoise.denoise_as_in_the_paper(noisy, 25, 0, exponential)
        assert denoise.psnr(image, photograph) > before + 7
        return
    fit = denoise.denoise(noisy, 25)
    reached = [denoise.psnr(image, photograph) for image in fit.images]
    assert reached[0] > before + 7 and reached[-1] > reached[0]
    assert abs(float(fit.first.params["noise_auto_loc"]) - 25) < 3
    assert 0.01 < np.mean(fit.last.params["W_auto_probs"]) < 0.2
    axes = denoise.plot(photograph, noisy, fit).axes
    assert axes[0].get_title() == "original" and len(axes) == 4
    plt.close("all")


@pytest.mark.exhaustive
def test_a_run_that_is_killed_goes_on_with_the_same_numbers(monkeypatch, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="orbax is needed by this example only")
    long_run = imported("long_run", monkeypatch)
    jax.config.update("jax_enable_x64", False)
    folder = tmp_path / "killed"
    options = ["--folder", folder, "--tasks", "300", "--steps", "100000", "--minutes"]
    # jobs in the background are deaf to Ctrl-C, and so are theirs
    hear = "signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    code = f"import runpy, signal, sys; {hear}runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, EXAMPLES / "long_run.py", *options]
    # Ctrl-C stores what there is
    with subprocess.Popen([*command, "60"], stderr=subprocess.PIPE) as process:
        output = b""
        while b"bound" not in output and process.poll() is None:
            output += process.stderr.read1()
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    (stored,) = _checkpoints(folder)
    assert process.returncode == 0
    with subprocess.Popen([*command, "0"], stderr=subprocess.DEVNULL) as process:
        while _checkpoints(folder)[-1] == stored and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and int(_checkpoints(folder)[-1]) > int(stored)
    num_steps = int(_checkpoints(folder)[-1]) + 15
    model = long_run.nss.models.factor_analysis(20)
    ends = []
    for folder in ("killed", "whole"):
        svi = long_run.nss.CAVI(model, long_run.nss.PairedGuide(model), plain=True)
        call = num_steps, tmp_path / folder, 60.0, long_run.responses(300)
        with pytest.warns(UserWarning, match="the bound still moves"):
            ends.append(long_run.fit(svi, *call))
        assert _checkpoints(tmp_path / folder)[-1] == str(num_steps)
    for x, y in zip(*map(jax.tree.leaves, map(long_run.arrays, ends)), strict=True):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y)


def _checkpoints(folder: Path) -> list[str]:
    """Return the complete checkpoints in order."""
    names = [path.name for path in folder.glob("*")] if folder.exists() else []
    return sorted((name for name in names if name.isdigit()), key=int)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_fit_their_page_and_are_stored_with_outputs_and_without_warnings(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    # as wide as their page
    assert max(len(line.rstrip()) for cell in cells for line in cell["source"]) <= 80
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
