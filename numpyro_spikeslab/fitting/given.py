# SPDX-License-Identifier: Apache-2.0
"""What methods of guides take and give for a model: its arguments, start values of its chains."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import jax.numpy as jnp

from numpyro.distributions import biject_to, constraints

from numpyro_spikeslab.reading.evaluate import abstract_trace
from numpyro_spikeslab.reading.form import is_latent


def check_given(model: Callable, method: str, example: str, arguments: tuple) -> None:
    """Refuse a call without the arguments of the model.

    :param arguments: the positional ones and the others.
    """
    # a model that closes over its data takes none
    if not any(arguments) and signature(model).parameters:
        raise ValueError(
            f"PairedGuide.{method}: a guide keeps no data. Give the model's arguments, as in "
            f"`guide.{method}(result.params, {example})`."
        )


def chain_values(
    model: Callable, found: dict[str, Any], unconstrained: Sequence[str], arguments: tuple
) -> dict[str, Any]:
    """Start values of chains.

    :param found: values of the latent sites, and others.
    :param unconstrained: names of those whose values are to be unconstrained.
    """
    trace = abstract_trace(model, *arguments)
    values = {name: found[name] for name in trace if is_latent(trace, name)}
    # a fit may reach the end of the interval, where no chain can start
    for name, value in values.items():
        if trace[name]["fn"].support == constraints.unit_interval:
            values[name] = jnp.clip(value, 1e-6, 1 - 1e-6)
    if unknown := sorted(set(unconstrained) - set(values)):
        raise ValueError(
            f"PairedGuide.to_init_params: `unconstrained` has unknown names {unknown}; the "
            f"latent sites are {sorted(values)}."
        )
    for name in unconstrained:
        values[name] = biject_to(trace[name]["fn"].support).inv(values[name])
    return values
