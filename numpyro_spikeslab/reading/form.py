# SPDX-License-Identifier: Apache-2.0
"""The description of a model that no value of its sites changes: names, shapes, roles."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxtyping import Num
import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.algebra.partition import Partition, joined
from numpyro_spikeslab.reading.roles import Role
from numpyro_spikeslab.reading.sites import Pair

# Gram matrices of all tasks are kept up to this many numbers; above, tiles of tasks recompute them.
GRAM_LIMIT = 2**25


class CoefficientSite(NamedTuple):
    """A site of coefficients, with values as arrays of shape (Q, C).

    - **axis** - the negative axis of its shape that is the tasks, each with coefficients of its own
      on shared covariates. `None` where all entries are one dense vector and Q is 1.
    """

    site: str
    axis: int | None

    def take(self, x: Any, behind: int = 0) -> Any:
        """Return values of the site as (Q, C), with ``behind`` further axes, which stay."""
        x = jnp.asarray(x)[None] if self.axis is None else jnp.moveaxis(x, self.axis - behind, 0)
        return x.reshape(len(x), -1, *x.shape[x.ndim - behind :])

    def put(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Invert :meth:`take`, for a site of this shape."""
        behind = x.shape[2:]
        if self.axis is None:
            return x.reshape(*shape, *behind)
        others = list(shape)
        del others[self.axis]
        return jnp.moveaxis(x.reshape(len(x), *others, *behind), 0, self.axis - len(behind))


def task_axis(
    site: dict[str, Any], slab: dict[str, Any], observed: Sequence[Any]
) -> tuple[int | None, bool]:
    """Return the negative axis of a site that is the tasks, the first axis of the slabs: the one in
    their plate, if the observed sites stand in it, too, or else the only one of their number; and
    whether it is in the plate."""
    slabs, shape = jnp.shape(slab["value"]), jnp.shape(site["value"])
    if len(slabs) != 2:
        return None, False
    tasks = {frame.name for frame in slab["cond_indep_stack"] if frame.dim == -2}
    dims = [frame.dim for frame in site["cond_indep_stack"] if frame.name in tasks]
    plates = [{frame.name for frame in other["cond_indep_stack"]} for other in observed]
    if dims and all(tasks & names for names in plates):
        return int(dims[0]) - int(site["fn"].event_dim), True
    fitting = [k for k in range(-len(shape), 0) if shape[k] == slabs[0]]
    return (fitting[0] if len(fitting) == 1 else None), False


@dataclass(frozen=True)
class Form:
    """The description of a model; hashable.

    - **pairs** - its spike-and-slab weights; flattened and joined they are the P coordinates.
    - **others** - all other latent sites and the params, without the functions that weights mix.
    - **response** - the observed site.
    - **likelihood** - its :class:`~numpyro_spikeslab.reading.likelihood.AnyDensity`.
    - **functions** - the latent functions that the weights mix, or `None`.
    - **sparse** - whether the observations are the entries of a sparse table.
    - **kernels** - the ``others`` that are parameters of the kernels, and only that.
    - **num_tasks**, **num_features**, **num_obs** - Q, M, N; 1, P, N of a design.
    - **tasks_first** - whether the observations are (Q, N), not (N, Q).
    - **roles** - the ``others`` that are noise scales, inclusion probabilities, slab scales or
      scales of coefficients.
    - **scales** - the ``others`` without a role on which only noise scales of Normal observations
      depend.
    - **concentrations** - the ``others`` on which only Beta priors of inclusion depend.
    - **shaping** - the ``others`` on which the prior of the weights depends.
    - **coefficients** - the ``others`` with a Normal prior on which only the predictor depends, and
      prior means of other coefficients. The predictor is affine in weights and coefficients.
    - **of_tasks** - the coefficients, if each task has its own on constant covariates that all
      tasks share; else none.
    - **links** - pairs of coefficients; the prior mean of the first is affine in the second.
    - **constant_covariates** - whether the rows of the coefficients depend on data alone.
    - **complete** - whether all tasks have the same weights of observations, in one column.
    - **varying_noise** - whether noise may change along a task.
    - **constant_rows** - whether the design depends on data alone.
    - **constant_design** - whether the weights of the observations do so, too; a stand-in for the
      likelihood may change them.
    """

    pairs: tuple[Pair, ...]
    others: tuple[str, ...]
    response: str = ""
    likelihood: Any = None
    functions: str | None = None
    sparse: bool = False
    kernels: tuple[str, ...] = ()
    num_tasks: int = 1
    num_features: int = 0
    num_obs: int = 0
    tasks_first: bool = False
    roles: tuple[Role, ...] = ()
    scales: tuple[str, ...] = ()
    concentrations: frozenset[str] = frozenset()
    shaping: frozenset[str] = frozenset()
    coefficients: tuple[str, ...] = ()
    of_tasks: tuple[CoefficientSite, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    constant_covariates: bool = False
    complete: bool = True
    varying_noise: bool = False
    constant_rows: bool = False
    constant_design: bool = False

    @property
    def fixed_design(self) -> bool:
        """Whether the whitened design depends on data alone."""
        return self.constant_design and self.likelihood.is_fixed

    def is_fixed_by(self, sites: Collection[str]) -> bool:
        """Whether only these sites and those with a role or of kernels change the view."""
        return self.likelihood.is_fixed and set(sites).issuperset(self.free)

    @property
    def is_design(self) -> bool:
        """Whether each weight has a column of its own, in one design."""
        return self.functions is None and self.num_tasks == 1

    @property
    def shares_features(self) -> bool:
        """Whether all tasks have weights of the same known features."""
        return self.functions is None and self.num_tasks > 1

    @property
    def keeps_products(self) -> bool:
        """Whether tasks share a Gram matrix, or have matrices of few numbers."""
        return self.complete or self.size * self.num_features <= GRAM_LIMIT

    @property
    def size(self) -> int:
        """The number of weights, P."""
        return sum(pair.size for pair in self.pairs)

    @property
    def shape(self) -> tuple[int, int]:
        """(Q, M)."""
        return self.num_tasks, self.num_features

    @property
    def table(self) -> tuple[int, int]:
        """(N, Q)."""
        return self.num_obs, self.num_tasks

    @property
    def free(self) -> tuple[str, ...]:
        """The other sites without a kernel or a role with a mode: to change one runs the model."""
        updated = {*self.kernels, *(role.site for role in self.roles_with_mode)}
        return tuple(name for name in self.others if name not in updated)

    @property
    def roles_with_mode(self) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if role.has_mode)

    @property
    def searched(self) -> bool:
        """Whether some free sites have no closed maximum given all else."""
        return not set(self.free) <= set(self.coefficients)

    def roles_of(self, kind: type[Role]) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if isinstance(role, kind))

    def coefficient_sites(self, names: Collection[str]) -> tuple[CoefficientSite, ...]:
        sites = self.of_tasks or [CoefficientSite(name, None) for name in self.coefficients]
        return tuple(each for each in sites if each.site in names)

    @property
    def weight_sites(self) -> tuple[CoefficientSite, ...]:
        """The weights, as sites of one vector, or of the tasks that share features."""
        axis = -2 if self.shares_features else None
        return tuple(CoefficientSite(pair.name, axis) for pair in self.pairs)

    def join(self, values: dict[str, Any], key: str) -> Num[Any, " P"]:
        """Flatten and join ``values[key.format(pair.name)]`` over the pairs."""
        return jnp.concatenate([jnp.ravel(values[key.format(p.name)]) for p in self.pairs])

    def split(self, flat: Num[Any, " P"], key: str) -> dict[str, Any]:
        """Invert :meth:`join`."""
        ends = np.cumsum([pair.size for pair in self.pairs])[:-1]
        return {
            key.format(pair.name): part.reshape(pair.shape)
            for pair, part in zip(self.pairs, jnp.split(flat, ends), strict=True)
        }

    @cached_property
    def sets(self) -> Partition:
        """The coordinates that a draw visits in sets, see :attr:`Pair.sets`."""
        return joined(tuple(pair.sets for pair in self.pairs))

    def join_spikes(self, values: dict[str, Any]) -> Num[Any, " P"]:
        spikes = {pair.name: pair.of_weights(values[pair.spike]) for pair in self.pairs}
        return self.join(spikes, "{}")

    def split_spikes(self, flat: Num[Any, " P"]) -> dict[str, Any]:
        """Invert :meth:`join_spikes`."""
        spikes = self.split(flat, "{}")
        return {pair.spike: pair.of_spikes(spikes[pair.name]) for pair in self.pairs}

    def tasks_last(self, x: Any) -> Any:
        """Reshape what broadcasts to the observations to (N or 1, Q or 1), or to (L or 1, 1)."""
        if self.is_design or self.sparse or (jnp.ndim(x) == 1 and self.num_tasks == 1):
            return jnp.reshape(x, (-1, 1))
        x = jnp.reshape(x, (1,) * (2 - jnp.ndim(x)) + jnp.shape(x))
        return x.T if self.tasks_first else x
