# SPDX-License-Identifier: Apache-2.0
"""Spike-and-slab inference for NumPyro programs."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version as _installed_version
from typing import TYPE_CHECKING, Any

from numpyro_spikeslab import models
from numpyro_spikeslab.fitting.cavi import CAVI
from numpyro_spikeslab.fitting.mean_field import MeanFieldGuide
from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.fitting.schedules import annealing
from numpyro_spikeslab.models.background import background
from numpyro_spikeslab.models.distributions import OrderedProbit, SpikeSlab
from numpyro_spikeslab.models.primitives import latent_functions, spike_slab
from numpyro_spikeslab.reading.sites import paired_sites
from numpyro_spikeslab.sampling.latent_gibbs import LatentGibbs, latent_sites
from numpyro_spikeslab.sampling.paired_gibbs import PairedGibbs

if TYPE_CHECKING:
    from numpyro_spikeslab import datasets
    from numpyro_spikeslab.fitting.variational import add_variational_stats
    from numpyro_spikeslab.reporting.align import align, invariants
    from numpyro_spikeslab.reporting.credible_sets import credible_sets
    from numpyro_spikeslab.reporting.models_table import models_table
    from numpyro_spikeslab.reporting.next_measurements import next_measurements
    from numpyro_spikeslab.reporting.plot_effects import plot_effects
    from numpyro_spikeslab.reporting.plot_functions import plot_fit, plot_latent_functions
    from numpyro_spikeslab.reporting.plot_inclusion import plot_inclusion, plot_weights
    from numpyro_spikeslab.reporting.tables import compare, summary
    from numpyro_spikeslab.tables.estimators import SparseClassifier, SparseRegressor
    from numpyro_spikeslab.tables.evidence import compare_models, log_evidence, tempered_evidence
    from numpyro_spikeslab.tables.predict import log_likelihood, predict
    from numpyro_spikeslab.tables.regression import sparse_regression
    from numpyro_spikeslab.tables.statistics import sparse_regression_from_statistics

__all__ = [
    "CAVI",
    "LatentGibbs",
    "MeanFieldGuide",
    "OrderedProbit",
    "PairedGibbs",
    "PairedGuide",
    "SparseClassifier",
    "SparseRegressor",
    "SpikeSlab",
    "add_variational_stats",
    "align",
    "annealing",
    "background",
    "compare",
    "compare_models",
    "credible_sets",
    "datasets",
    "invariants",
    "latent_functions",
    "latent_sites",
    "log_evidence",
    "log_likelihood",
    "models",
    "models_table",
    "next_measurements",
    "paired_sites",
    "plot_effects",
    "plot_fit",
    "plot_inclusion",
    "plot_latent_functions",
    "plot_weights",
    "predict",
    "sparse_regression",
    "sparse_regression_from_statistics",
    "spike_slab",
    "summary",
    "tempered_evidence",
]
try:
    __version__ = _installed_version("numpyro_spikeslab")
except PackageNotFoundError:  # imported from sources that are not installed
    __version__ = "0.0.0"

# Tables and pictures take seconds to import, and most programs make none.
_LAZY = {
    "SparseClassifier": "tables.estimators",
    "SparseRegressor": "tables.estimators",
    "add_variational_stats": "fitting.variational",
    "align": "reporting.align",
    "compare": "reporting.tables",
    "compare_models": "tables.evidence",
    "credible_sets": "reporting.credible_sets",
    "datasets": "datasets",
    "invariants": "reporting.align",
    "log_evidence": "tables.evidence",
    "log_likelihood": "tables.predict",
    "models_table": "reporting.models_table",
    "next_measurements": "reporting.next_measurements",
    "plot_effects": "reporting.plot_effects",
    "plot_fit": "reporting.plot_functions",
    "plot_inclusion": "reporting.plot_inclusion",
    "plot_latent_functions": "reporting.plot_functions",
    "plot_weights": "reporting.plot_inclusion",
    "predict": "tables.predict",
    "sparse_regression": "tables.regression",
    "sparse_regression_from_statistics": "tables.statistics",
    "summary": "reporting.tables",
    "tempered_evidence": "tables.evidence",
}

if not TYPE_CHECKING:  # for type checkers all names above are there, and no others

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_LAZY[name]}")
        return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
