# SPDX-License-Identifier: Apache-2.0
"""The sites of a trace: pairs, latent functions, observations."""

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.heredity import AnyPrior, HereditaryPrior
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.models.distributions import HereditarySpikes
from numpyro_spikeslab.models.primitives import FUNCTIONS_MARK, GROUPS, MARK, Functions
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import base_of, is_plain

SET = "is_set"
"""Key of a latent site in an abstract trace: whether a handler of the user's has set its value."""

NO_PAIRS = (
    "the model has no spike-and-slab weights. Write "
    "`numpyro_spikeslab.spike_slab(name, inclusion, scale)` in it."
)

FAMILIES: dict[str, tuple[type, ...]] = {
    "spike": (dist.BernoulliProbs, dist.BernoulliLogits, HereditarySpikes),
    "slab": (dist.Normal,),
}
"""Priors of the two sites of a pair."""


class Pair(NamedTuple):
    """The weights of one :func:`~numpyro_spikeslab.spike_slab`; ``groups`` are the numbers of their
    spikes, where weights share one, and ``heredity`` their parents."""

    name: str
    shape: tuple[int, ...]
    groups: tuple[int, ...] | None = None
    heredity: Any = None

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
        """Shapes of the two sites."""
        spikes = self.shape if self.groups is None else (max(self.groups) + 1,)
        return {self.spike: spikes, self.slab: self.shape}

    @property
    def firsts(self) -> Any:
        """The first weight of each group: it stands for the spike where weights are counted."""
        groups = np.arange(self.size) if self.groups is None else np.asarray(self.groups)
        return np.unique(groups, return_index=True)[1]

    @property
    def sets(self) -> Partition:
        """The weights that a draw visits in sets: those that share a spike, and each one by itself
        if spikes need others."""
        if self.groups is None and self.heredity is None:
            return Partition(self.size)
        least = 2 if self.heredity is None else 1
        return Partition.of_spikes(self.groups or range(self.size), least)

    def prior(self, alone: Prior) -> AnyPrior:
        """Return the prior of the weights, given that of each if its spike needs no other."""
        if self.heredity is None:
            return alone
        return HereditaryPrior(*alone, self.heredity, self.firsts)

    def in_batch(self, shape: tuple[int, ...]) -> "Pair":
        """Return the weights with the number of tasks of this shape; columns stay as they are."""
        return self._replace(shape=shape) if len(shape) == len(self.shape) == 2 else self

    def of_weights(self, spikes: Any) -> Any:
        """Return the spike of each weight; leading axes stay."""
        return spikes if self.groups is None else spikes[..., np.asarray(self.groups)]

    def allowed(self, spikes: Any) -> Any:
        """Return 1 for each weight whose parents allow it, else 0."""
        if self.heredity is None:
            return jnp.ones_like(spikes)
        return 1.0 * self.of_weights(self.heredity.missing(self.of_spikes(spikes)) <= 0)

    def of_spikes(self, x: Any) -> Any:
        """Return values of weights by spikes, equal for weights of one spike; leading axes stay."""
        return x if self.groups is None else x[..., self.firsts]


def paired_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Name the spikes and slabs of a trace: a selector for :class:`numpyro.infer.Gibbs`.

    :param trace: a trace of the model.
    :return: names of the sample sites that :func:`~numpyro_spikeslab.spike_slab` made.
    :raises ValueError: if there are none.

    **Example**

    .. doctest::

        >>> from numpyro.infer import NUTS, Gibbs
        >>> import numpyro_spikeslab as nss
        >>> def kernel(model):
        ...     return Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
    """
    names = tuple(_parts_of_pairs(trace))
    if not names:
        raise ValueError(f"paired_sites: {NO_PAIRS}")
    return names


def _parts_of_pairs(trace: dict[str, Any]) -> list[str]:
    return [
        name
        for name, site in trace.items()
        if site["type"] == "sample" and MARK in site["infer"] and not site["is_observed"]
    ]


def find_pairs(
    trace: dict[str, Any], user: str, fixed: frozenset[str] = frozenset()
) -> tuple[Pair, ...]:
    """Return the pairs of a trace, without ``fixed`` sites, whose values another kernel holds.

    :raises ValueError: if there is none or one is broken.
    """
    pairs: dict[str, dict[str, Any]] = {}
    for name in _parts_of_pairs(trace):
        if name in fixed:
            continue
        part = trace[name]["infer"][MARK][1]
        # a scope may have renamed the site, not its mark
        owner = name.removesuffix(f"_{part}")
        # the mark of sites in NumPyro's scan
        if "_scan_current_index" in trace[name]["infer"]:
            raise ValueError(
                f"{user}: spike_slab({owner!r}, ...) stands inside of a `scan`, where each turn "
                "has weights of its own. Write it before the loop, in a plate as long as the loop, "
                "and let `scan` run over the weights."
            )
        pairs.setdefault(owner, {})[part] = trace[name]
    if not pairs:
        raise ValueError(f"{user}: {NO_PAIRS}")
    made = tuple(_pair_of(owner, sites, trace, user) for owner, sites in pairs.items())
    is_alone = user == "PairedGibbs" and len(made) == 1 and len(made[0].shape) == 1
    if not is_alone and any(pair.heredity for pair in made):
        remedy = "PairedGibbs draws such weights, if they are all weights of a model."
        raise bad(f"{user}: heredity", f"parents of weights in {[*pairs]}", "None", remedy)
    return made


def _pair_of(
    owner: str, sites: dict[str, dict[str, Any]], trace: dict[str, Any], user: str
) -> Pair:
    """Make a pair of its two sites, or say why they are not as spike_slab has made them."""

    def broken(message, remedy):
        return ValueError(f"{user}: the pair {owner!r} is broken: {message}. {remedy}")

    call = f"spike_slab({owner!r}, ...)"
    latent = f"Leave both sites of {call} latent, or hold both with `handlers.condition`."
    for part, site in sites.items():
        # handlers.do leaves a site whose value nothing uses, with this key
        if site.get(SET) or "_intervener_id" in site:
            setters = "`handlers.substitute` or `handlers.do`"
            raise broken(f"'{owner}_{part}' is set, as by {setters}", latent)
    weights = trace.get(owner, {})
    product = weights.get("intermediates")
    # the value of a branch is another object
    if product and weights["value"] is not product[0] and "_control_flow_done" not in weights:
        message = f"{owner!r} itself is set, and is not the product of its spikes and slabs"
        raise broken(message, f"Leave it to {call}.")
    for part in FAMILIES:
        if part not in sites:
            raise broken(f"'{owner}_{part}' is observed, reparameterised or hidden", latent)
    spike, slab = (jnp.shape(sites[part]["value"]) for part in FAMILIES)
    heredity = getattr(base_of(sites["spike"]["fn"]), "heredity", None)
    pair = Pair(owner, slab, sites["spike"]["infer"].get(GROUPS), heredity)
    if spike != pair.shapes[pair.spike]:
        message = f"{pair.spike!r} has shape {spike} and {pair.slab!r} has shape {slab}"
        raise broken(message, f"Leave both to {call}.")
    for part, families in FAMILIES.items():
        if not is_plain(sites[part], families):
            base = base_of(sites[part]["fn"])
            got = "a masked or scaled one" if isinstance(base, families) else type(base).__name__
            raise broken(
                f"the prior of '{owner}_{part}' must be {families[0].__name__}, got {got}",
                f"Leave the prior to {call}, and put masks and scales around the likelihood alone.",
            )
    return pair


def find_function_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the sites of latent functions, observed ones included."""
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and FUNCTIONS_MARK in site["infer"]
    )


def functions_of(site: dict[str, Any]) -> Functions:
    """Return the definition of the functions of a site, with the names that a scope has given."""
    functions: Functions = site["infer"][FUNCTIONS_MARK]
    prefix = site["name"].removesuffix(functions.name)
    parameters = functions.parameters.prefixed(prefix)
    return replace(functions, name=site["name"], parameters=parameters)


def observed_sites(trace: dict[str, Any]) -> frozenset[str]:
    """Return the names of the observed sites of a trace."""
    return frozenset(name for name, site in trace.items() if site.get("is_observed"))


def is_latent(trace: dict[str, Any], name: str) -> bool:
    """Whether a site is there, is sampled and has not been observed."""
    return name in trace and trace[name]["type"] == "sample" and not trace[name]["is_observed"]


def param_name(site: str, prefix: str, params: dict[str, Any]) -> str:
    """Return the name of the parameter that has the value of a latent site or a model's param."""
    name = f"{site}_{prefix}_loc"
    return name if name in params else site
