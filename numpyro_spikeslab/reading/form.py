# SPDX-License-Identifier: Apache-2.0
"""What about a model does not change with the values of its sites: names, shapes, roles."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from jaxtyping import Num
import numpy as np

import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.primitives import FUNCTIONS_MARK, GROUPS, MARK, Functions
from numpyro_spikeslab.priors import base_of, is_plain
from numpyro_spikeslab.roles import Role

COLUMNS, SHARED, FUNCTIONS, ENTRIES = "columns", "shared", "functions", "entries"
"""Kinds of features: a design whose columns are multiplied by one weight each; features that are
known and the same for all tasks; latent functions; latent functions of which some entries of the
table of points and tasks are observed, in one row of observations."""


SET = "is_set"
"""Key of a latent site in an abstract trace: whether a handler of the user's has set its value."""


class Pair(NamedTuple):
    """The weights of one :func:`~numpyro_spikeslab.spike_slab`.

    - **name**, **shape** - of the weights.
    - **groups** - which spike each of the weights has, where several share one; else `None`.
    """

    name: str
    shape: tuple[int, ...]
    groups: tuple[int, ...] | None = None

    @property
    def spike(self) -> str:
        return f"{self.name}_spike"

    @property
    def slab(self) -> str:
        return f"{self.name}_slab"

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the sites."""
        spikes = self.shape if self.groups is None else (max(self.groups) + 1,)
        return {self.spike: spikes, self.slab: self.shape}

    @property
    def firsts(self) -> Any:
        """The first weight of each group: it stands for the spike where weights are counted."""
        return np.unique(np.asarray(self.groups), return_index=True)[1]

    def of_weights(self, spikes: Any) -> Any:
        """The spike of each weight; leading axes stay."""
        return spikes if self.groups is None else spikes[..., np.asarray(self.groups)]

    def of_spikes(self, x: Any) -> Any:
        """What weights have in common that share a spike, by spikes; leading axes stay."""
        return x if self.groups is None else x[..., self.firsts]


class CoefficientSite(NamedTuple):
    """A site of coefficients, with values as arrays of shape (Q, C).

    - **site** - its name.
    - **axis** - the negative axis of its shape that is the tasks, each of which has coefficients of
      its own on shared covariates. `None` where all entries are one dense vector and Q is 1.
    """

    site: str
    axis: int | None

    def take(self, x: Any, behind: int = 0) -> Any:
        """Return values of the site as (Q, C).

        :param behind: number of further axes behind those of the site, which stay.
        """
        x = jnp.asarray(x)[None] if self.axis is None else jnp.moveaxis(x, self.axis - behind, 0)
        return x.reshape(len(x), -1, *x.shape[x.ndim - behind :])

    def put(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Invert :meth:`take`, for a site of this shape."""
        behind = x.shape[2:]
        if self.axis is None:
            return x.reshape(*shape, *behind)
        rest = list(shape)
        del rest[self.axis]
        return jnp.moveaxis(x.reshape(len(x), *rest, *behind), 0, self.axis - len(behind))


def task_axis(site: dict[str, Any], slab: dict[str, Any], seen: Sequence[Any]) -> int | None:
    """The axis of a site, counted from the end, that is the first one of weights of shape (Q, M):
    the one of the same plate, in which observations are, too. `None` if there is none.

    :param slab: the slabs of the weights.
    :param seen: observed sites.
    """
    if jnp.ndim(slab["value"]) != 2:
        return None
    tasks = {frame.name for frame in slab["cond_indep_stack"] if frame.dim == -2}
    dims = [frame.dim for frame in site["cond_indep_stack"] if frame.name in tasks]
    plates = [{frame.name for frame in other["cond_indep_stack"]} for other in seen]
    if not dims or not all(tasks & names for names in plates):
        return None
    return int(dims[0]) - int(site["fn"].event_dim)


class Source(NamedTuple):
    """Which constant of a linearised map is its matrix, and whether features are its columns."""

    position: int
    transposed: bool


@dataclass(frozen=True)
class Form:
    """What is known of a model; hashable. Pairs and other sites are read off its trace, the rest is
    proved from its program or found by running it.

    - **pairs** - its spike-and-slab weights; flattened and joined they are the P coordinates.
    - **others** - names of all other latent sample sites and of the model's params, without the
      functions that weights mix.
    - **likelihood** - name of the observed Normal site.
    - **kind** - :data:`COLUMNS`, :data:`SHARED`, :data:`FUNCTIONS` or :data:`ENTRIES`.
    - **functions** - name of the latent functions that the weights mix, or `None`.
    - **kernels** - names of those of ``others`` that are parameters of their kernels alone.
    - **num_tasks**, **num_features**, **num_obs** - Q, M, N; one task of N observations and P
      features where the kind is :data:`COLUMNS`.
    - **tasks_first** - whether the observations are (Q, N), not (N, Q).
    - **roles** - those of the other sites that are noise scales, inclusion probabilities or slab
      scales.
    - **coefficients** - those with a Normal prior in which, and in the weights, the location is
      affine, and on which nothing else depends, save means of each other.
    - **of_tasks** - all of these, where each task has its own, on covariates that all tasks share
      and that depend on data alone; else none.
    - **links** - pairs of these, of which the prior mean of the first is affine in the second.
    - **constant_covariates** - whether the rows of the coefficients depend on data alone.
    - **complete** - whether all tasks count and weigh the same observations alike, so that one
      matrix of weights (N, 1) serves all.
    - **varying_noise** - whether noise may change along a task.
    - **constant_rows** - whether the design depends on data alone.
    - **constant_design** - whether it does so with the weights of the observations.
    - **sources** - for each pair, where its columns of the design are among the constants of the
      linearised location, `None` where they are not known to be there.
    """

    pairs: tuple[Pair, ...]
    others: tuple[str, ...]
    likelihood: str = ""
    kind: str = COLUMNS
    functions: str | None = None
    kernels: tuple[str, ...] = ()
    num_tasks: int = 1
    num_features: int = 0
    num_obs: int = 0
    tasks_first: bool = False
    roles: tuple[Role, ...] = ()
    coefficients: tuple[str, ...] = ()
    of_tasks: tuple[CoefficientSite, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    constant_covariates: bool = False
    complete: bool = True
    varying_noise: bool = False
    constant_rows: bool = False
    constant_design: bool = False
    sources: tuple[Source | None, ...] = ()

    @property
    def size(self) -> int:
        """P, the number of weights."""
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
        """The other sites that belong to no kernel and have no role with a mode."""
        known = {*self.kernels, *(role.site for role in self.roles_with_mode)}
        return tuple(name for name in self.others if name not in known)

    @property
    def roles_with_mode(self) -> tuple[Role, ...]:
        """The roles whose mode has a closed form."""
        return tuple(role for role in self.roles if role.has_mode)

    @property
    def searched(self) -> bool:
        """Whether some free sites have no maximum in closed form, given all else."""
        return not set(self.free) <= set(self.coefficients)

    def roles_of(self, kind: type[Role]) -> tuple[Role, ...]:
        """The roles of one kind."""
        return tuple(role for role in self.roles if isinstance(role, kind))

    def coefficient_sites(self, names: Collection[str]) -> tuple[CoefficientSite, ...]:
        """Those of the coefficients that have these names."""
        sites = self.of_tasks or [CoefficientSite(name, None) for name in self.coefficients]
        return tuple(each for each in sites if each.site in names)

    def join(self, values: dict[str, Any], key: str) -> Num[Any, " P"]:
        """Flatten and join ``values[key.format(pair.name)]`` over the pairs."""
        return jnp.concatenate([jnp.ravel(values[key.format(p.name)]) for p in self.pairs])

    def split(self, flat: Num[Any, " P"], key: str) -> dict[str, Any]:
        """The inverse of :meth:`join`."""
        ends = np.cumsum([pair.size for pair in self.pairs])[:-1]
        return {
            key.format(pair.name): part.reshape(pair.shape)
            for pair, part in zip(self.pairs, jnp.split(flat, ends), strict=True)
        }

    @property
    def groups(self) -> tuple[int, ...] | None:
        """Which spike each of the P coordinates has, `None` if each has its own."""
        if all(pair.groups is None for pair in self.pairs):
            return None
        every: list[int] = []
        for pair in self.pairs:
            first = max(every, default=-1) + 1
            every += [first + k for k in pair.groups or range(pair.size)]
        return tuple(every)

    def join_spikes(self, values: dict[str, Any]) -> Num[Any, " P"]:
        """The spike of each weight."""
        own = {pair.name: pair.of_weights(values[pair.spike]) for pair in self.pairs}
        return self.join(own, "{}")

    def split_spikes(self, flat: Num[Any, " P"]) -> dict[str, Any]:
        """The inverse of :meth:`join_spikes`."""
        own = self.split(flat, "{}")
        return {pair.spike: pair.of_spikes(own[pair.name]) for pair in self.pairs}

    def tasks_last(self, x: Any) -> Any:
        """Something of each observation, of a shape that broadcasts, as (N or 1, Q or 1); of
        entries as (L or 1, 1)."""
        if self.kind in (COLUMNS, ENTRIES) or (jnp.ndim(x) == 1 and self.num_tasks == 1):
            return jnp.reshape(x, (-1, 1))
        x = jnp.reshape(x, (1,) * (2 - jnp.ndim(x)) + jnp.shape(x))
        return x.T if self.tasks_first else x


def paired_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the spikes and slabs of a trace: a selector for :class:`numpyro.infer.Gibbs`.

    :param trace: a trace of the model.
    :return: names of the sample sites that :func:`~numpyro_spikeslab.spike_slab` made.

    **Example**

    .. doctest::

        >>> from numpyro.infer import NUTS, Gibbs
        >>> import numpyro_spikeslab as nss
        >>> def kernel(model):
        ...     return Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
    """
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and MARK in site["infer"] and not site["is_observed"]
    )


def find_pairs(
    trace: dict[str, Any], user: str, fixed: frozenset[str] = frozenset()
) -> tuple[Pair, ...]:
    """The pairs of a trace, in order.

    :param user: who needs them, for the error message.
    :param fixed: names of sites whose values another kernel holds.
    :raises ValueError: if there is none or one is broken.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name in paired_sites(trace):
        if name in fixed:
            continue
        part = trace[name]["infer"][MARK][1]
        # a scope may have renamed the site, not its mark
        owner = name.removesuffix(f"_{part}")
        # the mark with which NumPyro's scan tells its sites from others
        if "_scan_current_index" in trace[name]["infer"]:
            raise ValueError(
                f"{user}: spike_slab({owner!r}, ...) stands inside of a `scan`, where each turn "
                "has weights of its own. Write it before the loop, in a plate as long as the loop, "
                "and let `scan` run over the weights."
            )
        parts.setdefault(owner, {})[part] = trace[name]
    if not parts:
        raise ValueError(
            f"{user}: the model has no spike-and-slab weights. Write "
            "`numpyro_spikeslab.spike_slab(name, inclusion, scale)` in it."
        )
    for owner, sites in parts.items():
        _check_set(owner, trace, [f"{owner}_{part}" for part in sites], user)
        for part, other in (("spike", "slab"), ("slab", "spike")):
            if part not in sites:
                raise ValueError(
                    f"{user}: the pair {owner!r} is broken: '{owner}_{other}' has lost its "
                    f"'{owner}_{part}', which is observed, reparameterised or hidden. Leave "
                    f"both sites of spike_slab({owner!r}, ...) latent."
                )
        _check_prior(owner, sites, user)
    return tuple(_pair_of(owner, sites) for owner, sites in parts.items())


def _check_set(owner: str, trace: dict[str, Any], sites: Sequence[str], user: str) -> None:
    """Raise if a handler has given a site of a pair its value."""
    for name in sites:
        # handlers.do leaves a site whose value nothing uses, and its own mark at it
        if trace[name].get(SET) or "_intervener_id" in trace[name]:
            raise ValueError(
                f"{user}: the pair {owner!r} is broken: {name!r} is set, as by "
                f"`handlers.substitute` or `handlers.do`. Leave both sites of "
                f"spike_slab({owner!r}, ...) latent, or hold both with `handlers.condition`."
            )
    site = trace.get(owner, {})
    before = site.get("intermediates")
    # what comes out of a branch is no longer the same object
    if before and site["value"] is not before[0] and "_control_flow_done" not in site:
        raise ValueError(
            f"{user}: the pair {owner!r} is broken: {owner!r} itself is set, and is not the "
            f"product of its spikes and slabs. Leave it to spike_slab({owner!r}, ...)."
        )


def _pair_of(owner: str, sites: dict[str, Any]) -> Pair:
    groups = sites["spike"]["infer"].get(GROUPS)
    return Pair(owner, jnp.shape(sites["slab"]["value"]), groups)


def _check_prior(owner: str, sites: dict[str, Any], user: str) -> None:
    shapes = [jnp.shape(sites[part]["value"]) for part in ("spike", "slab")]
    if shapes != list(_pair_of(owner, sites).shapes.values()):
        raise ValueError(
            f"{user}: the pair {owner!r} is broken: '{owner}_spike' has shape {shapes[0]} and "
            f"'{owner}_slab' has shape {shapes[1]}. Leave both to spike_slab({owner!r}, ...)."
        )
    for part, families in (
        ("spike", (dist.BernoulliProbs, dist.BernoulliLogits)),
        ("slab", (dist.Normal,)),
    ):
        site = sites[part]
        if not is_plain(site, families):
            wanted = " or ".join(family.__name__ for family in families)
            base = base_of(site["fn"])
            found = type(base).__name__
            remedy = f"Leave the prior to spike_slab({owner!r}, ...)."
            if isinstance(base, families):
                found = f"a masked or scaled {found}"
                remedy = "Put `handlers.mask` and `handlers.scale` around the likelihood alone."
            raise ValueError(
                f"{user}: the pair {owner!r} is broken: the prior of '{owner}_{part}' must be "
                f"{wanted}, neither masked nor scaled, got {found}. {remedy}"
            )


def find_function_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the sites of latent functions, observed ones included."""
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and FUNCTIONS_MARK in site["infer"]
    )


def functions_of(site: dict[str, Any]) -> Functions:
    """What defines the functions of a site, with the names that a scope has given to all of it."""
    functions: Functions = site["infer"][FUNCTIONS_MARK]
    prefix = site["name"].removesuffix(functions.name)
    sites = tuple(tuple(f"{prefix}{name}" for name in names) for names in functions.sites)
    return replace(functions, name=site["name"], sites=sites)


def observed_sites(trace: dict[str, Any]) -> frozenset[str]:
    """Names of the observed sites of a trace."""
    return frozenset(name for name, site in trace.items() if site.get("is_observed"))


def is_latent(trace: dict[str, Any], name: str) -> bool:
    """Whether a site is there, is sampled and has not been observed."""
    return name in trace and trace[name]["type"] == "sample" and not trace[name]["is_observed"]


def param_name(site: str, prefix: str, params: dict[str, Any]) -> str:
    """Name of the parameter that holds the value of a latent site or a model's param."""
    name = f"{site}_{prefix}_loc"
    return name if name in params else site
