# SPDX-License-Identifier: Apache-2.0
"""Random models are answered rightly or not at all."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from random_models import Generated, Structure, structures

from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.reader import Reader, Reading

pytestmark = pytest.mark.usefixtures("x64")

NUM_MODELS, DATA_SETS = 200, 4
STRUCTURES = structures(0, NUM_MODELS // DATA_SETS)


close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)


def test_the_models_are_many():
    """All layouts, all kinds of sites and all that must be refused occur."""
    accepted = [s for s in STRUCTURES if s.link is None]
    assert len(set(STRUCTURES)) > 0.8 * len(STRUCTURES)
    assert len({s.layout for s in accepted}) == 6 and len({s.sites for s in accepted}) > 8
    assert len({s.link for s in STRUCTURES}) == 11
    assert any(s.is_event and s.counts for s in accepted)


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
        design = reading.design or reading.design_at(values, reading.view(values).relative[:, 0])
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
    names = "'w'|'y'|'other'|'w_spike'"
    with pytest.raises(ValueError, match=rf"(?s)^test: .*({names})"):
        Reader(generated.model, "test")((generated.data,), {})


@pytest.mark.parametrize("number", range(len(STRUCTURES)))
def test_a_model_is_read_rightly_or_refused(number):
    structure = STRUCTURES[number]
    read = None
    for k in range(DATA_SETS):
        generated = Generated(structure, DATA_SETS * number + k)
        if structure.link is not None:
            check_refusal(generated)
            continue
        # one reader for all data, which it must not mistake for each other
        read = read or Reader(generated.model, "test")
        reading = read((generated.data,), {})
        rng = np.random.default_rng([number, k])
        for _ in range(3 if reading.form.others else 1):
            check_view(reading, generated, generated.draw(rng))
