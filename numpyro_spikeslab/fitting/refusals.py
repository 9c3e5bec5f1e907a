# SPDX-License-Identifier: Apache-2.0
"""What a fit does not take."""

from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from numpyro.infer.autoguide import AutoDelta

from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reading.form import ENTRIES
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading


def check_state(posterior: Posterior, like: Posterior) -> None:
    """Raise if a state is one of other data, or of other groups or blocks.

    :param like: a posterior of these data as shapes.
    """

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
    """Start values of a user as arrays of the parameters' shapes, in their supports.

    :param start: start value and support of each parameter.
    """
    if unknown := sorted(set(init_params) - set(start)):
        raise bad("CAVI: init_params", f"unknown names {unknown}", f"some of {sorted(start)}")
    params = {}
    for name, value in init_params.items():
        like, support = start[name]
        what = f"CAVI: init_params[{name!r}]"
        if jnp.shape(value) != jnp.shape(like):
            raise bad(what, f"shape {jnp.shape(value)}", f"{jnp.shape(like)}")
        params[name] = jnp.asarray(value, float)
        if are_concrete(value) and not np.all(support(params[name])):
            raise bad(what, "values that are not finite or not in the support", f"{support}")
    return params


def refuse(guide: SpikeSlabGuide, plain: bool, reading: Reading) -> None:
    """What a fit does not take, of a guide that has been set up and of a model."""
    if guide.inner is not None and not isinstance(guide.inner, AutoDelta):
        raise ValueError(
            f"CAVI: the guide's inner guide is {type(guide.inner).__name__}, whose bound "
            "has no closed form. Use AutoDelta, or fit with numpyro.infer.SVI."
        )
    form = reading.form
    if moving := [site for site, support in reading.supports.items() if support is None]:
        raise ValueError(
            f"CAVI: the support of {moving[0]!r} depends on other sites of the model. Make it a "
            "function of a site whose support does not, such as `low + "
            'numpyro.sample("above", dist.HalfNormal(1.0))`.'
        )
    for name, value in reading.params.items():
        if not jax.tree_util.all_leaves([value]):
            raise ValueError(
                f"CAVI: the param {name!r} is a {type(value).__name__} of arrays, expected one "
                "array. Make each array a param, or fit with numpyro.infer.SVI."
            )
    names = [name for name in guide.sites.functions if name in form.others]
    if names:
        shape = form.pairs[0].shape
        raise ValueError(
            f"CAVI: the location of {form.likelihood!r} is not `offset + {form.pairs[0].name} "
            f"@ {names[0]}` (or its transpose) with weights of shape {shape} and the functions "
            f"{names[0]!r}. Write it so, with one set of weights of shape (Q, M), "
            f"without `groups`, and M functions, or sample the model.{reading.if_traced}"
        )
    if plain and reading.functions is None:
        raise ValueError(
            "CAVI: `plain` has no effect on a model without latent functions. Leave it out; "
            "`temperature=None` gives the paper's updates."
        )
    if form.kind == ENTRIES and not (reading.functions and reading.functions.is_white):
        raise ValueError(
            f"CAVI: the observations {form.likelihood!r} are entries of a table, for which the "
            f"functions {form.functions!r} must be 'white' with a mean of zero, as in "
            "models.factor_analysis. For others give the whole table, with NaN where entries "
            "are missing."
        )
    if reading.functions is not None:
        reading.functions.check("CAVI")
