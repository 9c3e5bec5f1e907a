# SPDX-License-Identifier: Apache-2.0
"""What a model's author writes: the spike-and-slab prior as a primitive and as a distribution."""

from math import inf, prod
from typing import Any

import numpy as np

from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.primitives import _PYRO_STACK
from numpyro.util import is_prng_key, not_jax_tracer

MARK = "spike_slab"
"""Key in the ``infer`` dictionary of both sites of a pair; its value is ``(name, part)``."""


def spike_slab(
    name: str,
    inclusion: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    *,
    expected_size: ArrayLike | None = None,
) -> Any:
    """Weights that are exactly zero or Normal: ``w = s * w_tilde`` (paper, eq. 3).

    Inside plates, makes the sample sites ``{name}_spike`` (Bernoulli) and ``{name}_slab`` (the
    slab's Normal prior) and the deterministic site ``name``, their product. Both sites are marked
    in their ``infer`` dictionaries, which is how :class:`~numpyro_spikeslab.PairedGuide`,
    :class:`~numpyro_spikeslab.CAVI` and :class:`~numpyro_spikeslab.PairedGibbs` find them.

    :param name: name of the weights.
    :param inclusion: prior probability ``pi`` that a weight is not zero, in (0, 1). A float, an
        array (one per weight) or the value of another latent site.
    :param scale: standard deviation ``sigma_w`` of the slab, positive; likewise. Defaults to 1,
        which suits standardised features and responses.
    :param expected_size: instead of ``inclusion``, the prior expected number of nonzero weights
        among all the weights of the enclosing plates.
    :return: the weights, in the shape of the enclosing plates.
    :raises ValueError: if ``inclusion`` is outside (0, 1) or ``scale`` is not positive, if not
        exactly one of ``inclusion`` and ``expected_size`` is given, or if ``expected_size`` is not
        between 0 and the number of weights.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro_spikeslab as nss
        >>> def model(X):
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", expected_size=2)
        ...     return X @ w
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     model(jnp.ones((3, 10))).shape
        (3,)
    """
    if (inclusion is None) == (expected_size is None):
        raise ValueError(
            f"spike_slab({name!r}): give either `inclusion` or `expected_size`, not both or none."
        )
    if expected_size is not None:
        size = prod(frame.size for frame in _PYRO_STACK if isinstance(frame, numpyro.plate))
        _require(name, "expected_size", expected_size, 0.0, float(size), "the number of weights")
        inclusion = jnp.asarray(expected_size) / size
    _require(name, "inclusion", inclusion, 0.0, 1.0, "a probability")
    _require(name, "scale", scale, 0.0, inf, "a standard deviation")
    spike = numpyro.sample(
        f"{name}_spike", dist.Bernoulli(probs=inclusion), infer={MARK: (name, "spike")}
    )
    slab = numpyro.sample(f"{name}_slab", dist.Normal(0.0, scale), infer={MARK: (name, "slab")})
    return numpyro.deterministic(name, weights(spike, slab))


def weights(spike: ArrayLike, slab: ArrayLike) -> Any:
    """``w = s * w_tilde``, without the negative zeros of a product."""
    return jnp.where(jnp.asarray(spike, bool), slab, 0.0)


def _require(name: str, argument: str, value: Any, low: float, high: float, why: str) -> None:
    """Raise unless a concrete ``value`` lies strictly between ``low`` and ``high``."""
    if not not_jax_tracer(value):
        return
    # numpy, because under a transformation jax.numpy makes tracers of constants
    value = np.asarray(value)
    if not np.all((value > low) & (value < high)):
        raise ValueError(
            f"spike_slab({name!r}): every `{argument}` must lie strictly between {low} and {high} "
            f"({why}), got {value}."
        )


class _RealWithAtom(constraints.Constraint):
    """The real line under a measure with an atom at zero."""

    def __call__(self, x):
        return (x == x) & (x != float("inf")) & (x != float("-inf"))

    def feasible_like(self, prototype):
        return jnp.zeros_like(prototype)

    def tree_flatten(self):
        return (), ((), dict())


@biject_to.register(_RealWithAtom)
def _no_bijection(constraint):
    raise NotImplementedError(
        "SpikeSlab has an atom at zero, so gradient-based inference of a SpikeSlab site would be "
        "wrong. Write `numpyro_spikeslab.spike_slab(name, ...)` in the model instead."
    )


class SpikeSlab(dist.Distribution):
    """The spike-and-slab distribution of a weight: zero with probability ``1 - pi``, else Normal.

    A distribution for priors, plots and predictive use; in a model to be inferred write
    :func:`spike_slab`. The log density is with respect to Lebesgue measure plus a unit atom at
    zero (paper, eq. 1c).

    :param inclusion: ``pi``, probability of the slab.
    :param scale: ``sigma_w``, standard deviation of the slab.
    :param loc: mean of the slab, 0 in a prior and not in a posterior.

    **Example**

    .. doctest::

        >>> import numpyro_spikeslab as nss
        >>> prior = nss.SpikeSlab(0.25, scale=2.0)
        >>> float(prior.variance)
        1.0
        >>> float(prior.cdf(0.0) - prior.cdf(-1e-6)) > 0.75
        True
    """

    arg_constraints = {
        "inclusion": constraints.unit_interval,
        "scale": constraints.positive,
        "loc": constraints.real,
    }
    support = _RealWithAtom()

    def __init__(
        self,
        inclusion: ArrayLike,
        scale: ArrayLike = 1.0,
        loc: ArrayLike = 0.0,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.inclusion, self.scale, self.loc = promote_shapes(inclusion, scale, loc)
        batch_shape = lax.broadcast_shapes(*map(jnp.shape, (inclusion, scale, loc)))
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def _slab(self) -> dist.Normal:
        return dist.Normal(self.loc, self.scale)

    def sample(self, key, sample_shape=()):
        assert is_prng_key(key)
        key_spike, key_slab = random.split(key)
        shape = sample_shape + self.batch_shape
        spike = random.bernoulli(key_spike, self.inclusion, shape)
        slab = self.loc + self.scale * random.normal(key_slab, shape)
        return jnp.where(spike, slab, 0.0)

    @validate_sample
    def log_prob(self, value):
        slab = jnp.log(self.inclusion) + self._slab.log_prob(value)
        return jnp.where(value == 0.0, jnp.log1p(-self.inclusion), slab)

    @property
    def mean(self):
        return jnp.broadcast_to(self.inclusion * self.loc, self.batch_shape)

    @property
    def variance(self):
        second_moment = self.inclusion * (self.scale**2 + self.loc**2)
        return jnp.broadcast_to(second_moment - (self.inclusion * self.loc) ** 2, self.batch_shape)

    def cdf(self, value):
        """Probability of a weight at most ``value``; jumps by ``1 - pi`` at zero."""
        return self.inclusion * self._slab.cdf(value) + (1.0 - self.inclusion) * (value >= 0.0)

    def icdf(self, q):
        """Quantile function; exactly 0 for every ``q`` inside the jump of :meth:`cdf`."""
        slab_below_zero = self._slab.cdf(0.0)
        below = self.inclusion * slab_below_zero
        inside = (q >= below) & (q <= below + 1.0 - self.inclusion)
        tail = jnp.where(q < below, q, q - (1.0 - self.inclusion)) / self.inclusion
        slab = self.loc + self.scale * ndtri(jnp.clip(jnp.where(inside, 0.5, tail), 0.0, 1.0))
        return jnp.where(inside, 0.0, slab)
