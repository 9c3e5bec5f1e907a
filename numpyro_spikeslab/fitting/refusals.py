# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a fit."""

from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.reading.checks import check_start, check_updates
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.support.messages import bad


def check_state(posterior: Posterior, like: Posterior) -> None:
    """Raise if a state has other shapes than ``like``: is of other data, groups or blocks."""

    def shapes(x):
        return jax.tree.structure(x), [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]

    if shapes(posterior) != shapes(like):
        raise bad(
            "CAVI: init_state",
            "a state of data of other shapes, or of a guide with other blocks or groups",
            "one of these data and this guide",
            "Begin anew; start values from other data are `init_params`.",
        )


def checked_params(
    init_params: dict[str, Any], start: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Return the start values of a user as arrays, if they have the shapes and supports of
    ``start``, the start value and support of each parameter."""
    check_start("CAVI", init_params, {name: jnp.shape(x) for name, (x, _) in start.items()})
    params = {name: jnp.asarray(value, float) for name, value in init_params.items()}
    for name, value in params.items():
        support = start[name][1]
        if are_concrete(value) and not np.all(support(value)):
            got = "values that are not finite or not in the support"
            raise bad(f"CAVI: init_params[{name!r}]", got, f"{support}")
    return params


def refuse(guide: SpikeSlabGuide, plain: bool, reading: Reading, has_batches: bool) -> None:
    """Raise if a fit does not take a guide, which has been set up, or a model."""
    form, functions = reading.form, reading.functions
    if unfit := [site for site, support in reading.supports.items() if support is None]:
        remedy = "Make it a function of another site, such as `low + above`, above ~ HalfNormal(1)."
        got = "a support that depends on other sites"
        raise bad(f"CAVI: {unfit[0]!r}", got, "one that does not", remedy)
    factors = set() if has_batches else guide.points.betas.keys() & reading.indices.keys()
    if unbounded := [x for x in (*reading.unbounded, *guide.points.betas) if x not in factors]:
        got = "a density without a maximum, by a concentration below 1"
        remedy = "Draw with PairedGibbs, or take Beta(1, 1)."
        raise bad(f"CAVI: the prior of {unbounded[0]!r}", got, "one with a maximum", remedy)
    for name, value in reading.params.items():
        if not jax.tree_util.all_leaves([value]):
            got = f"a {type(value).__name__} of arrays"
            raise bad(f"CAVI: the param {name!r}", got, "an array", "Make each array a param.")
    remedy = "Draw with PairedGibbs, or fit the guide with numpyro.infer.SVI."
    check_updates("CAVI", form, functions, remedy)
    if names := [name for name in guide.sites.functions if name in form.others]:
        (weights, shape), phi = form.pairs[0][:2], names[0]
        raise bad(
            f"CAVI: {form.response!r}",
            f"a location that does not mix the functions {phi!r} by the weights of shape {shape}",
            f"`offset + {weights} @ {phi}` or its transpose",
            "Write it with one set of weights of shape (Q, M), without `groups`, and M functions, "
            "or sample the model. Of entries of a table, the likelihood needs the places, "
            f"`infer={{'entries': (rows, columns)}}`.{reading.if_traced}",
        )
    if functions is not None:
        functions.check("CAVI")
    elif plain:
        got, remedy = "True for a model without latent functions", "Leave it out."
        raise bad("CAVI: plain", got, "False", remedy)


def refuse_traced_functions(reading: Reading, arrays: Any) -> None:
    """Raise if a fit of latent functions cannot start or run, since ``arrays`` are traced."""
    if reading.functions is not None and not are_concrete(arrays):
        raise bad(
            "CAVI",
            "a start or a run of latent functions within jit or vmap",
            "concrete data and states",
            "Moves are decided outside of compiled code: call `init` and `run` there.",
        )
