# SPDX-License-Identifier: Apache-2.0
"""Random models are answered rightly or not at all."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from random_models import Generated, Structure, generate, join, structures
from scipy import stats
import truth

import jax
from jax import random

from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.reader import Reader, Reading

pytestmark = pytest.mark.usefixtures("x64")

NUM_MODELS, DATA_SETS = 200, 4
STRUCTURES = structures(0, NUM_MODELS // DATA_SETS)
PLAIN = [s for s in STRUCTURES if s.link is None and s.sites in ("none", "held intercept")]


close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)


def named(structure: Structure) -> str:
    parts = (structure.layout, structure.link or structure.sites, *structure.counts)
    return ", ".join(parts)


EVERY_STRUCTURE = pytest.mark.parametrize("number", range(len(STRUCTURES)))
FEW = pytest.mark.parametrize("structure", PLAIN[:6], ids=named)


def test_the_models_are_many():
    """All layouts, all kinds of sites and all that must be refused occur."""
    accepted = [s for s in STRUCTURES if s.link is None]
    assert len(set(STRUCTURES)) > 0.8 * len(STRUCTURES)
    assert len({s.layout for s in accepted}) == 6 and len({s.sites for s in accepted}) > 8
    assert len({s.link for s in STRUCTURES}) == 11
    assert len(PLAIN) > 8 and any(s.is_event and s.counts for s in accepted)


def tasks_last(structure: Structure, x: np.ndarray) -> np.ndarray:
    """Something of each observation, as a view has it, (N, Q)."""
    x = np.reshape(x, structure.shape)
    return x.T if structure.layout == "tasks first" else x


def check_view(reading: Reading, generated: Generated, values: dict[str, Any]) -> None:
    """The arrays of a reading are those of the regression."""
    structure, form = generated.structure, reading.form
    expected, view = generated.regression(values), reading.view(values)

    def of_all(x):
        x = np.ravel(x) if form.kind == COLUMNS else tasks_last(structure, x)
        return x.reshape(form.num_obs, form.num_tasks)

    log_scale = expected.weight * np.log(expected.scale * np.sqrt(2 * np.pi))
    for actual, desired in (
        (view.Y, of_all(expected.y)),
        (view.precision, of_all(expected.weight / expected.scale**2)),
        (view.count, of_all(expected.weight).sum(axis=0)),
        (view.log_scale, log_scale.sum()),
        (np.ravel(view.prior.log_odds), np.log(expected.inclusion) - np.log1p(-expected.inclusion)),
        (np.ravel(view.prior.variance), expected.slab_scale**2),
    ):
        close(*np.broadcast_arrays(actual, desired))
    if form.kind == COLUMNS:
        design = reading.design or reading.design_at(values)
        rows = np.asarray(design.rows).reshape(-1, form.num_obs)[: form.size]
        close(rows, expected.X.T * np.sqrt(np.ravel(view.relative)))
        return
    # shared features are those of each task, where any task has observations or may have
    Q, M = form.shape
    full = expected.X.reshape(*structure.shape, Q, M)
    full = full.swapaxes(0, 1) if structure.layout == "tasks first" else full
    seen = np.any(tasks_last(structure, expected.weight) > 0, axis=1) | (not form.constant_design)
    for task in range(Q):
        close(reading.features, (full[:, task, task] * seen[:, None]).T)


def check_refusal(generated: Generated) -> None:
    with pytest.raises(ValueError, match=r"^test: ") as caught:
        Reader(generated.model, "test")((generated.data,), {})
    names = ("'w'", "'y'", "'other'", "'w_spike'")
    assert any(name in str(caught.value) for name in names), caught.value


@pytest.mark.slow
@EVERY_STRUCTURE
def test_a_model_is_read_rightly_or_refused(number):
    structure = STRUCTURES[number]
    read = None
    for k in range(DATA_SETS):
        generated = generate(structure, DATA_SETS * number + k)
        if structure.link is not None:
            check_refusal(generated)
            continue
        # one reader for all data, which it must not mistake for each other
        read = read or Reader(generated.model, "test")
        reading = read((generated.data,), {})
        rng = np.random.default_rng([number, k])
        for _ in range(3 if reading.form.others else 1):
            check_view(reading, generated, generated.draw(rng))


# Fits and samples


@cache
def fitter(structure: Structure) -> nss.CAVI:
    model = generate(structure, 0).model
    return nss.CAVI(model, nss.PairedGuide(model), temperature=None)


@pytest.mark.slow
@FEW
def test_no_bound_exceeds_the_log_evidence(structure):
    for seed in range(5):
        generated = generate(structure, seed)
        exact = truth.enumerate_models(generated.regression({}))
        result = fitter(structure).run(random.key(0), 50, generated.data, progress_bar=False)
        bounds = -np.asarray(result.losses)
        slack = 1e-9 * max(1.0, abs(exact.log_evidence))
        assert np.all(bounds <= exact.log_evidence + slack)
        assert bounds[-1] > exact.log_evidence - 6.0


NUM_CHAINS, NUM_BATCHES = 2, 50
FALSE_ALARM = 1e-6
"""Of each comparison; there are 60 of them, so fewer than one in 10 000 keys fails."""


def agrees(draws: np.ndarray, expected: np.ndarray) -> bool:
    """Whether means of draws (chain, draw, ...) are what they should be, by means of batches."""
    batches = draws.reshape(NUM_CHAINS * NUM_BATCHES, -1, *draws.shape[2:]).mean(axis=1)
    error = batches.std(axis=0, ddof=1) / np.sqrt(len(batches))
    limit = stats.t.isf(FALSE_ALARM / 2, len(batches) - 1)
    # what has never been seen happens less often than this, but for one key in a million
    floor = -np.log(FALSE_ALARM) / draws[..., 0].size
    return bool(np.all(np.abs(draws.mean(axis=(0, 1)) - expected) <= limit * error + floor))


@pytest.mark.slow
@FEW
def test_samples_are_those_of_the_posterior(structure):
    generated = generate(structure, 3)
    exact = truth.enumerate_models(generated.regression({}))
    mcmc = MCMC(
        nss.PairedGibbs(generated.model),
        num_warmup=200,
        num_samples=5000,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), generated.data)
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    assert agrees(join(structure, draws, "{}_spike", 2), exact.inclusion)
    assert agrees(join(structure, draws, "{}", 2), exact.mean)
