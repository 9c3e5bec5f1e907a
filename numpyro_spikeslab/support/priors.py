# SPDX-License-Identifier: Apache-2.0
"""Facts about the prior of a site that are known before the model runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer


@jax.tree_util.register_pytree_node_class
class Distributions(dict):
    """Distributions by name, as a tree whose leaves have the same order in each process.

    NumPyro's order is that of a set of strings, so a stored program would seldom be found.
    """

    def tree_flatten(self) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        """Return the fields of all distributions by their names, and what is not an array."""
        fields, kinds = [], []
        for name, fn in sorted(self.items()):
            values, aux = fn.tree_flatten()
            named = dict(zip(type(fn).gather_pytree_data_fields(), values, strict=True))
            inner = {
                k: Distributions({k: x})
                for k, x in named.items()
                if isinstance(x, dist.Distribution)
            }
            fields.append(named | inner)
            kinds.append((name, type(fn), aux))
        return fields, tuple(kinds)

    @classmethod
    def tree_unflatten(cls, kinds: tuple[Any, ...], fields: Any) -> "Distributions":
        """Make the distributions again, in the order of fields that NumPyro has in this process."""
        made = cls()
        for (name, kind, aux), named in zip(kinds, fields, strict=True):
            values = (named[k] for k in kind.gather_pytree_data_fields())
            inner = [x.popitem()[1] if isinstance(x, cls) else x for x in values]
            made[name] = kind.tree_unflatten(aux, tuple(inner))
        return made


WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


def base_of(fn: Any) -> Any:
    """Return the distribution under expansion, independence and masks."""
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    return fn


def is_unbounded(fn: Any) -> Any:
    """Whether the density of a prior is known to have no maximum, by a concentration below 1."""
    base, names = base_of(fn), ("concentration", "concentration0", "concentration1")
    if not isinstance(base, dist.Beta | dist.Gamma | dist.Kumaraswamy | dist.Weibull):
        return jnp.array(False)
    return sum(jnp.any(getattr(base, name, 1.0) < 1) for name in names) > 0


def is_plain(site: dict[str, Any], families: Sequence[type]) -> bool:
    """Test whether a site has a prior of these families, neither masked nor scaled."""
    fn = site["fn"]
    while isinstance(fn, WRAPPERS) and not isinstance(fn, dist.MaskedDistribution):
        fn = fn.base_dist
    return type(fn) in families and site["scale"] is None


def bounds(support: Any) -> tuple[Any, Any] | None:
    """Return the ends of an interval of real numbers, which may be traced; `None` for a support of
    another kind."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    low, high = (getattr(support, f"{end}_bound", None) for end in ("lower", "upper"))
    is_interval = type(support) is type(constraints.real) or low is not None or high is not None
    if support.is_discrete or not is_interval:
        return None
    return -np.inf if low is None else low, np.inf if high is None else high


def is_drawable(site: dict[str, Any], upper: float = np.inf) -> bool:
    """Whether the prior of a site can be drawn from and gives only numbers from 0 to ``upper``, as
    far as its bounds are known."""
    base = base_of(site["fn"])
    ends = bounds(base.support)
    if isinstance(base, dist.ImproperUniform) or not is_plain(site, (type(base),)) or ends is None:
        return False
    fits = (ends[0], lambda x: x >= 0), (ends[1], lambda x: x <= upper)
    return all(bool(np.all(fit(x))) for x, fit in fits if _is_known(x))


def _is_known(x: Any) -> bool:
    """Whether the bound of a support is more than the shape of an array that ended with a trace."""
    return not_jax_tracer(x) and not isinstance(x, jax.ShapeDtypeStruct)


def includes(support: Any, upper: float) -> bool:
    """Whether a support is known to have all numbers from 0 to ``upper``."""
    ends = bounds(support)
    if ends is None or not all(map(_is_known, ends)):
        return False
    return bool(np.all(ends[0] <= 0) and np.all(ends[1] >= upper))
