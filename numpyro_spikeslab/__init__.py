# SPDX-License-Identifier: Apache-2.0
"""Spike-and-slab inference for NumPyro programs."""

from typing import Any

from numpyro_spikeslab import models
from numpyro_spikeslab.cavi import CAVI, CAVIRunResult, annealing
from numpyro_spikeslab.diagnostics import add_variational_stats, align, compare, invariants, summary
from numpyro_spikeslab.distributions import SpikeSlab
from numpyro_spikeslab.guide import MeanFieldGuide, PairedGuide
from numpyro_spikeslab.primitives import latent_functions, spike_slab
from numpyro_spikeslab.reading.form import paired_sites
from numpyro_spikeslab.sampling.functions import (
    LatentGibbs,
    LatentGibbsState,
    latent_sites,
    mtmkl_kernel,
)
from numpyro_spikeslab.sampling.paired import PairedGibbs, PairedGibbsState

__all__ = [
    "CAVI",
    "CAVIRunResult",
    "LatentGibbs",
    "LatentGibbsState",
    "MeanFieldGuide",
    "PairedGibbs",
    "PairedGibbsState",
    "PairedGuide",
    "SpikeSlab",
    "add_variational_stats",
    "align",
    "annealing",
    "compare",
    "invariants",
    "latent_functions",
    "latent_sites",
    "models",
    "mtmkl_kernel",
    "paired_sites",
    "plot_fit",
    "plot_forest",
    "plot_inclusion",
    "plot_latent_functions",
    "plot_weights",
    "spike_slab",
    "summary",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # pictures take a second to import, and most programs draw none
    if name.startswith("plot_") and name in __all__:
        from numpyro_spikeslab import plots

        return getattr(plots, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
