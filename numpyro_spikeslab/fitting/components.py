# SPDX-License-Identifier: Apache-2.0
"""Mixtures of one guide at several parameters: which, their distribution and their quantiles."""

from math import prod
from typing import Any

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.infer.util import log_density
from numpyro.util import is_prng_key

from numpyro_spikeslab.algebra.quantiles import mixed
from numpyro_spikeslab.fitting.run import Optima
from numpyro_spikeslab.reading.form import Pair

DISTINCT = 0.1
"""Difference of an inclusion probability beyond which two optima are not the same."""


def distinct(guide: Any, optima: Optima) -> Int[np.ndarray, " K"]:
    """The optima that are not the same as a better one, the best first."""
    found = jax.vmap(guide.inclusion_probabilities)(optima.params).values()
    probs = np.concatenate([np.reshape(x, (len(optima.bounds), -1)) for x in found], axis=1)
    kept: list[int] = []
    for k in np.argsort(-optima.bounds, kind="stable"):
        if np.all(np.max(np.abs(probs[kept] - probs[k]), axis=1) > DISTINCT):
            kept.append(k)
    return np.array(kept)


def flatten(guide: Any, values: dict[str, Any]) -> Float[Array, "*batch D"]:
    """All latent sites of a guide in one vector; leading axes stay."""
    parts = []
    for name, shape in guide._shapes.items():
        x = jnp.asarray(values[name])
        parts.append(x.reshape(*x.shape[: x.ndim - len(shape)], prod(shape)))
    return jnp.concatenate(parts, axis=-1)


def unflatten(guide: Any, flat: Float[Array, "*batch D"]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    shapes, spikes = guide._shapes, {pair.spike for pair in guide.pairs}
    ends = np.cumsum([prod(shape) for shape in shapes.values()])[:-1]
    values = {}
    for (name, shape), x in zip(shapes.items(), jnp.split(flat, ends, axis=-1), strict=True):
        x = x.reshape(*flat.shape[:-1], *shape)
        values[name] = x.astype(int) if name in spikes else x
    return values


class Mixture(dist.Distribution):
    """All latent sites of a guide, as :func:`flatten` has them, at parameters that are drawn.

    :param probs: weights of the K components, shape (K,).
    :param components: their parameters, each behind a leading axis of K.
    :param guide: a guide that has been set up.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    """

    support = constraints.real_vector

    def __init__(
        self, probs: Any, components: dict[str, Any], guide: Any, args: tuple, kwargs: dict
    ) -> None:
        self.probs, self.components = probs, components
        self.guide, self.args, self.kwargs = guide, args, kwargs
        super().__init__((), (sum(map(prod, guide._shapes.values())),))

    def sample(self, key, sample_shape=()):
        assert is_prng_key(key)

        def draw(key):
            key_which, key_draw = random.split(key)
            which = random.categorical(key_which, jnp.log(self.probs))
            params = {name: x[which] for name, x in self.components.items()}
            component = handlers.substitute(handlers.seed(self.guide, key_draw), data=params)
            return flatten(self.guide, component(*self.args, **self.kwargs))

        # the sites of a component are not for those who watch the mixture
        with handlers.block():
            flat = jax.vmap(draw)(random.split(key, prod(sample_shape)))
        return flat.reshape(*sample_shape, *self.event_shape)

    @validate_sample
    def log_prob(self, value):
        def of_component(params, values):
            every = params | values | self.guide.auxiliary_values(values)
            return log_density(self.guide, self.args, self.kwargs, every)[0]

        def of_mixture(flat):
            each = jax.vmap(of_component, (0, None))(self.components, unflatten(self.guide, flat))
            return logsumexp(jnp.log(self.probs) + each)

        with handlers.block():
            found = jax.vmap(of_mixture)(value.reshape(-1, *self.event_shape))
        return found.reshape(value.shape[:-1])


# Quantiles of what has a leading axis of K components


def quantiles_of(
    guide: Any,
    pairs: dict[str, Pair | None],
    mixing: Float[Array, " K"],
    components: dict[str, Any],
    q: Any,
) -> dict[str, Float[Array, "Q ..."] | Int[Array, "Q ..."]]:
    """Quantiles of all sites.

    :param pairs: the weights, with their pairs where these are known.
    :param mixing: weights of the components.
    :param components: their parameters, each behind a leading axis of K.
    :param q: probabilities, shape (Q,).
    """
    found: dict[str, Any] = {}
    one = [{name: x[k] for name, x in components.items()} for k in range(len(mixing))]
    for name, pair in pairs.items():
        every = zip(*(guide.factors.slab_mixtures(name, params) for params in one), strict=True)
        parts = [mixed(mixing, jax.tree.map(lambda *x: jnp.stack(x), *each)) for each in every]
        found |= guide.quantiles_of_pair(name, pair, one[0], parts, q)
    # all else is a point in each component
    points = jax.vmap(guide._inner_median)(components)
    return {name: of_points(mixing, x, q) for name, x in points.items()} | found


def of_points(mixing: Float[Array, " K"], points: Any, q: Any) -> Float[Array, "Q ..."]:
    """Quantiles of what has one value in each component.

    :param points: shape (K, ...).
    """
    below = jnp.cumsum(mixing[jnp.argsort(points, axis=0)], axis=0)
    levels = jnp.reshape(q, (-1,) + (1,) * jnp.ndim(points))
    rank = jnp.sum(below < levels, axis=1)
    return jnp.take_along_axis(jnp.sort(points, 0), jnp.minimum(rank, len(points) - 1), 0)
