# SPDX-License-Identifier: Apache-2.0
"""Random models are answered rightly or not at all."""

import pytest
from truth.agreement import compare
from truth.random_models import Generated, structures

from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

NUM_MODELS, DATA_SETS = 200, 4
STRUCTURES = structures(0, NUM_MODELS // DATA_SETS)


def test_the_models_are_many():
    """All layouts, all kinds of sites and all that must be refused occur."""
    accepted = [s for s in STRUCTURES if s.link is None]
    assert len(set(STRUCTURES)) > 0.8 * len(STRUCTURES)
    assert len({s.layout for s in accepted}) == 6 and len({s.sites for s in accepted}) > 8
    assert len({s.link for s in STRUCTURES}) == 11
    assert any(s.is_event and s.counts for s in accepted)


def check_refusal(generated: Generated) -> None:
    names = "'w'|'y'|'other'|'w_spike'"
    with pytest.raises(ValueError, match=rf"(?s)^test: .*({names})"):
        Reader(generated.model, "test")((generated.data,), {})


@pytest.mark.parametrize("number", range(len(STRUCTURES)))
def test_a_model_is_read_rightly_or_refused(number):
    structure = STRUCTURES[number]
    reader = None
    for k in range(DATA_SETS):
        generated = Generated(structure, DATA_SETS * number + k)
        if structure.link is not None:
            check_refusal(generated)
            continue
        # one reader for all data, which it must not mistake for each other
        reader = reader or Reader(generated.model, "test")
        compare(reader, (generated.data,), {}, draws=3, rtol=1e-9)
