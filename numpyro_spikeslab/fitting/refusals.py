# SPDX-License-Identifier: Apache-2.0
"""What a fit does not take."""

from collections.abc import Callable
from inspect import ismethod
from typing import Any

import jax
import jax.numpy as jnp

from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoDelta

from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.reading.form import ENTRIES
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading


def refuse_other_guide(guide: SpikeSlabGuide, model: Callable, reading: Reading) -> None:
    """A guide of another model."""
    if ismethod(model) and ismethod(guide.model) and model == guide.model:
        # each time that it is looked up it is another object
        return
    given, own = ([pair.name for pair in x] for x in (reading.form.pairs, guide.pairs))
    if own and own != given:
        raise ValueError(
            f"CAVI: the weights of the model are {given} and those of the guide {own}. A guide "
            "is made for one model: give CAVI that of its own."
        )


def refuse_other_params(
    user: str, params: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Parameters that are not those of the weights and functions.

    :param shapes: of those that are.
    """
    for name, shape in shapes.items():
        if name not in params or jnp.shape(params[name]) != shape:
            found = f"the shape {jnp.shape(params[name])}" if name in params else "nothing"
            raise ValueError(
                f"{user}: params: got {found} for `{name}`, expected the shape {shape}. Give the "
                "parameters of a fit of this model to these arguments."
            )


def refuse_other_state(guide: SpikeSlabGuide, posterior: Posterior, reading: Reading) -> None:
    """A state of other data, or of a guide with other blocks."""
    functions, known = posterior.functions, reading.functions
    fits = jnp.size(posterior.weights.probs) == reading.form.size
    if functions is not None and known is not None:
        fits = fits and functions.mean.shape == known.mean.shape
    if not fits:
        raise ValueError(
            "CAVI: the state is one of data of other sizes. Begin anew, without `init_state`."
        )
    if not guide.factors.are_own(reading.form, posterior.weights):
        raise ValueError(
            "CAVI: the state is one with other blocks or groups. Make the guide with blocks of its "
            "own, `PairedGuide(model, blocks=fitted.blocks)`; with other groups begin anew."
        )


def refuse_outside(posterior: Posterior, reading: Reading) -> None:
    """A state with values that data of narrower supports leave out."""
    for site, support in reading.supports.items():
        # rounding may have put a value on the boundary, whose inverse is infinite and no NaN
        outside = jnp.any(jnp.isnan(biject_to(support).inv(posterior.values[site])))
        if are_concrete(outside) and outside:
            raise ValueError(
                f"CAVI: the state has a value of {site!r} that is not in its support, {support}, "
                "with these data. Begin anew, without `init_state`."
            )


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
    names = [name for name in guide.functions if name in form.others]
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
