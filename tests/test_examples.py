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

import matplotlib.pyplot as plt
import numpy as np
import pytest

import jax

from numpyro_spikeslab.datasets import boston_housing, toy_multioutput

pytestmark = pytest.mark.usefixtures("x64")
EXAMPLES = Path(__file__).parent.parent / "examples"


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of an example."""
    if not (EXAMPLES / f"{name}.py").exists():
        pytest.skip("the examples are not installed with the package")
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


def test_the_exact_posterior_is_a_sum_over_models(example):
    """Against one model after the other, each a Gaussian with the covariance of its inputs."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 3))
    y = X[:, 0] + 0.3 * rng.normal(size=20)
    exact = example.exact_posterior(X, y)
    log_joint, means, spikes = [], [], []
    for code in range(8):
        spike = np.array([code >> m & 1 for m in range(3)])
        used = X * spike
        covariance = 0.1 * np.eye(20) + used @ used.T
        solved = np.linalg.solve(covariance, y)
        log_joint.append(
            -0.5 * (20 * np.log(2 * np.pi) + np.linalg.slogdet(covariance)[1] + y @ solved)
            + np.sum(np.where(spike, np.log(0.25), np.log(0.75)))
        )
        means.append(used.T @ solved)
        spikes.append(spike)
    probs = np.exp(log_joint - np.logaddexp.reduce(log_joint))
    np.testing.assert_allclose(exact.log_evidence, np.logaddexp.reduce(log_joint), rtol=1e-12)
    np.testing.assert_allclose(exact.mean, probs @ means, atol=1e-12)
    np.testing.assert_allclose(exact.inclusion, probs @ spikes, atol=1e-12)


@pytest.mark.slow
def test_table_1(example):
    data = boston_housing()
    exact = example.exact_posterior(data.X, data.y)
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


@pytest.mark.slow
def test_digits_are_told_apart(monkeypatch):
    """Three classes and two sets of features, 20 labelled digits of each class."""
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    folder = EXAMPLES.parent.parent / "shared" / "data" / "mfeat"
    if not folder.exists():
        pytest.skip("the multiple features of digits are not here")
    example = imported("mfeat_classification", monkeypatch)
    every = example.load(folder)
    assert every.X.shape == (2000, 649) and len(every.sets) == 6
    few = every.classes < 3
    digits = example.Digits({k: every.sets[k][few] for k in ("fou", "zer")}, every.classes[few])
    labelled, rest = example.split(digits.classes, 0)
    assert labelled.size == 60 and not set(labelled) & set(rest)
    found = example.measures(digits.classes[rest], example.mtmkl(digits, labelled, rest))
    assert found["accuracy"] > 0.93 and found["AUC"] > 0.98
    # uninformative scores
    random_scores = np.random.default_rng(0).normal(size=(rest.size, 3))
    assert example.measures(digits.classes[rest], random_scores)["BEP"] < 0.45


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:There are not enough devices")
def test_chains_of_the_multi_task_model_agree_and_keep_what_they_promise(monkeypatch):
    """On the data set on which they are hardest to keep; four chains take minutes."""
    example = imported("toy_sampling", monkeypatch)
    toy = toy_multioutput(3)
    chains, _, found, ranks = example.compare(toy, 3)
    held = ~toy.observed
    errors = {k: np.sum((each.mean - toy.Y)[held] ** 2) for k, each in found.items()}
    assert errors["Gibbs"] < 1.1 * errors["PMF"]
    inside = example.calibration(ranks).loc["Gibbs", "in 90% intervals"]
    assert 0.85 < inside < 0.95
    assert example.convergence(chains).loc["f", "R-hat"] < 1.05
    assert example.active_functions(chains)[4] > 0.8


@pytest.fixture
def denoise(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    return imported("denoise", monkeypatch)


def test_blocks_make_their_image(denoise):
    image = np.random.default_rng(0).normal(size=(11, 9))
    blocks = denoise.blocks_of(image)
    assert blocks.shape == (64, 4 * 2)
    np.testing.assert_array_equal(blocks[:, 3].reshape(8, 8), image[1:9, 1:9])
    np.testing.assert_allclose(denoise.image_of(blocks, np.ones(8), image.shape), image)
    # the pixel in the corner is in one block, its neighbour in two with weights 1 and 3
    other = denoise.image_of(blocks + np.arange(8), np.array([1, 3] * 4), image.shape) - image
    np.testing.assert_allclose(other[0, :2], [0.0, 0.75])


def test_blocks_in_colour_make_their_image(denoise):
    image = np.random.default_rng(0).normal(size=(11, 9, 3))
    blocks = denoise.blocks_of(image)
    assert blocks.shape == (192, 4 * 2)
    np.testing.assert_array_equal(blocks[:, 3].reshape(3, 8, 8)[1], image[1:9, 1:9, 1])
    np.testing.assert_allclose(denoise.image_of(blocks, np.arange(1.0, 9), image.shape), image)


@pytest.mark.exhaustive
def test_an_image_is_completed(monkeypatch):
    """In single precision; a dense start, or one that copies the observed pixels, fails."""
    pytest.importorskip("sklearn", reason="scikit-learn is needed by this example only")
    jax.config.update("jax_enable_x64", False)
    inpaint = imported("inpaint", monkeypatch)
    truth = inpaint.photograph()[60:124, 20:84]
    observed = inpaint.without(truth, 0.8, seed=1)
    missing = np.isnan(observed)
    found = inpaint.inpaint(observed)
    np.testing.assert_array_equal(found.image[~missing], truth[~missing])
    guess = np.where(missing, np.nanmean(observed, axis=(0, 1)), observed)
    assert inpaint.psnr(found.image, truth) > inpaint.psnr(guess, truth) + 6
    assert 1 < np.mean(found.sizes) < 10
    # the least certain pixels have the largest errors
    error, order = abs(found.image - truth)[missing], np.argsort(found.sd[missing])
    quarter = len(order) // 4
    assert np.mean(error[order[-quarter:]]) > 2 * np.mean(error[order[:quarter]])
    assert len(inpaint.plot(truth, observed, found).axes) == 4
    plt.close("all")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["white", "exponential"])
def test_an_image_is_denoised(denoise, monkeypatch, kernel):
    """In single precision, as users do."""
    jax.config.update("jax_enable_x64", False)
    monkeypatch.setattr(denoise, "NUM_GROUPS", 30)
    monkeypatch.setattr(denoise, "NUM_STEPS", 30)
    truth = denoise.photograph()[60:124, 20:84]
    noisy = truth + 25 * np.random.default_rng(1).normal(size=truth.shape)
    before = denoise.psnr(noisy, truth)
    if kernel == "exponential":
        exponential = denoise.Exp(8.0, distance=denoise.L2Distance())
        image = denoise.denoise_as_in_the_paper(noisy, 25, 0, exponential)
        assert denoise.psnr(image, truth) > before + 7
        return
    found = denoise.denoise(noisy, 25)
    reached = [denoise.psnr(image, truth) for image in found.images]
    assert reached[0] > before + 7 and reached[-1] > reached[0]
    assert abs(float(found.first.params["noise_auto_loc"]) - 25) < 3
    assert 0.01 < np.mean(found.last.params["W_auto_probs"]) < 0.2
    axes = denoise.plot(truth, noisy, found).axes
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
        seen = b""
        while b"bound" not in seen and process.poll() is None:
            seen += process.stderr.read1()
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
def test_notebooks_are_stored_with_outputs_and_without_warnings(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
