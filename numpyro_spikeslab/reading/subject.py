# SPDX-License-Identifier: Apache-2.0
"""A model that is being read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_spikeslab.reading.form import Pair
from numpyro_spikeslab.reading.program import Program


class Subject(NamedTuple):
    """A model that is being read.

    - **trace** - its trace, without values.
    - **shapes** - of all its latent sites and params.
    - **pairs** - its pairs.
    - **program**, **constants** - from :func:`~numpyro_spikeslab.reading.model_run.program_of`.
    - **user** - who reads, for the error messages.
    """

    trace: dict[str, Any]
    shapes: dict[str, Any]
    pairs: tuple[Pair, ...]
    program: Program
    constants: tuple
    user: str

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the spikes and slabs."""
        return tuple(name for pair in self.pairs for name in (pair.spike, pair.slab))

    @property
    def others(self) -> tuple[str, ...]:
        """Names of all other latent sites and params."""
        return tuple(name for name in self.shapes if name not in self.own)

    def inputs(self) -> dict[str, Any]:
        """Shapes of what the program takes, each under a name that tells what it is."""
        dtype = jnp.result_type(float)
        weights = {f"weight {p.name}": jax.ShapeDtypeStruct(p.shape, dtype) for p in self.pairs}
        own = {f"own {name}": self.shapes[name] for name in self.own}
        return {f"site {name}": self.shapes[name] for name in self.others} | weights | own

    def run(self, inputs: dict[str, Any], of: Callable[[Any], Any] | None = None) -> Any:
        """Run the program on inputs with these names.

        :param of: takes a part of the result; the rest is not computed.
        """
        parts: dict[str, dict[str, Any]] = {"site": {}, "weight": {}, "own": {}}
        for key, value in inputs.items():
            part, _, name = key.partition(" ")
            parts[part][name] = value
        program = self.program if of is None else self.program.part(of)
        return program(self.constants, *parts.values())

    def location(self, likelihood: str, inputs: dict[str, Any]) -> Any:
        """Location of each observation of a site."""
        loc = self.run(inputs, lambda run: run.observed[likelihood].loc)
        return jnp.broadcast_to(loc, self.program.shapes.observed[likelihood].value.shape)
