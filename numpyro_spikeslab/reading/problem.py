# SPDX-License-Identifier: Apache-2.0
"""A model with its data, run at values of its sites."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.model_run import Run
from numpyro_spikeslab.reading.program import Program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """A model with its data.

    - **form** - its description; static in compiled code, and so is the program.
    - **program** - from :func:`~numpyro_spikeslab.reading.model_run.program_of`.
    - **constants** - the data.
    """

    form: Form = field(metadata={"static": True})
    program: Program = field(metadata={"static": True})
    constants: tuple

    def with_form(self, **changes: Any) -> "Problem":
        """Return the same model with another description."""
        return replace(self, form=replace(self.form, **changes))

    @property
    def inputs(self) -> dict[str, Any]:
        """Shapes of the arguments of :meth:`run`, by their names."""
        return dict(zip(("values", "weights", "parts"), self.program.arguments, strict=True))

    def run(
        self,
        values: dict[str, Any],
        weights: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        of: Callable[[Run], Any] | None = None,
    ) -> Any:
        """Run the model.

        :param values: of ``form.others``; of the functions where they are not to be zero.
        :param weights: by the names of the pairs; zero if not given.
        :param parts: spikes and slabs, on which no result depends; zero if not given.
        :param of: takes a part of the result, and the rest is not computed. The default is all of a
            :class:`~numpyro_spikeslab.reading.model_run.Run`.
        """
        shapes, form = self.inputs, self.form
        sites = {name: values[name] for name in form.others}
        if form.functions is not None:
            phi = values.get(form.functions)
            sites[form.functions] = _zeros(shapes["values"][form.functions]) if phi is None else phi
        weights = _zeros(shapes["weights"]) if weights is None else weights
        parts = _zeros(shapes["parts"]) if parts is None else parts
        program = self.program if of is None else self.program.part(of)
        return program(self.constants, sites, weights, parts)

    def likelihood(self, run: Any) -> Any:
        """Return the :class:`~numpyro_spikeslab.reading.likelihood.Gaussian` of a run, or of the
        shapes or sources of its results."""
        return run.observed[self.form.likelihood]

    def part(self, run: Run, name: str) -> list[Any]:
        """Return noise scales, inclusion probabilities or slab scales, the part of a role."""
        if name == "noise":
            return [self.likelihood(run).scale]
        which = "probs" if name == "inclusion" else "scale"
        return [getattr(run.pairs[pair.name], which) for pair in self.form.pairs]

    def predictor(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None, parts: Any = None
    ) -> Float[Array, "..."]:
        """Compute the location of the observations, in their shape; see :meth:`run`."""
        x = self.run(values, weights, parts, lambda run: self.likelihood(run).predictor)
        return jnp.broadcast_to(x, self.likelihood(self.program.shapes).value.shape)

    def predictor_of_tasks(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None
    ) -> Float[Array, "N Q"]:
        """Compute :meth:`predictor` with tasks as columns."""
        return self.form.tasks_last(self.predictor(values, weights))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
