# SPDX-License-Identifier: Apache-2.0
"""The spike-and-slab distribution, classes in order, and latent functions of guides."""

from math import prod
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_spikeslab.algebra import gp, truncated_normal
from numpyro_spikeslab.algebra.quantiles import across_atom


class _RealWithAtom(type(constraints.real)):  # type: ignore[misc]
    """The real line under a measure with an atom at zero."""


@biject_to.register(_RealWithAtom)
def _no_bijection(constraint):
    raise NotImplementedError(
        "SpikeSlab has an atom at zero, so gradient-based inference of a SpikeSlab site would be "
        "wrong. Write `numpyro_spikeslab.spike_slab(name, ...)` in the model instead."
    )


class SpikeSlab(dist.Distribution):
    r"""The spike-and-slab distribution of a weight: zero with probability ``1 - pi``, else Normal.

    .. math:: p(w) = (1 - \pi)\, \delta_0(w) + \pi\, \mathcal{N}(w \mid \mu, \sigma_w^2).

    For priors, plots and predictive use; in a model to be inferred write :func:`spike_slab`. The
    log density is with respect to Lebesgue measure plus a unit atom at zero (paper, eq. 1c).

    :param inclusion: ``pi``, probability of the slab. All arguments broadcast to the shape of the
        batch.
    :param scale: ``sigma_w``, standard deviation of the slab, 1 by default as in
        :func:`spike_slab`.
    :param loc: mean of the slab, 0 in a prior and not in a posterior.
    :raises ValueError: with ``validate_args``, if an argument is outside of its range.

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
        arrays = jnp.broadcast_arrays(*map(jnp.asarray, (inclusion, scale, loc)))
        self.inclusion, self.scale, self.loc = arrays
        super().__init__(self.inclusion.shape, validate_args=validate_args)

    @property
    def _slab(self) -> dist.Normal:
        return dist.Normal(self.loc, self.scale)

    def sample(self, key, sample_shape=()):
        """Draw weights, zeros among them: shape ``sample_shape`` and that of the parameters."""
        assert is_prng_key(key)
        key_spike, key_slab = random.split(key)
        shape = sample_shape + self.batch_shape
        spike = random.bernoulli(key_spike, self.inclusion, shape)
        slab = self.loc + self.scale * random.normal(key_slab, shape)
        return jnp.where(spike, slab, 0.0)

    @validate_sample
    def log_prob(self, value):
        """Compute the log density with respect to Lebesgue measure plus a unit atom at zero."""
        slab = jnp.log(self.inclusion) + self._slab.log_prob(value)
        return jnp.where(value == 0.0, jnp.log1p(-self.inclusion), slab)

    @property
    def mean(self):
        """Mean of a weight, ``pi loc``."""
        return self.inclusion * self.loc

    @property
    def variance(self):
        """Variance of a weight, ``pi (scale**2 + (1 - pi) loc**2)``."""
        return self.inclusion * (self.scale**2 + (1.0 - self.inclusion) * self.loc**2)

    def cdf(self, value):
        """Compute the probability of a weight at most ``value``; it jumps by ``1 - pi`` at zero."""
        return self.inclusion * self._slab.cdf(value) + (1.0 - self.inclusion) * (value >= 0.0)

    def icdf(self, q):
        """Compute quantiles, exactly 0 for every ``q`` inside the jump of :meth:`cdf`."""
        below = self.inclusion * self._slab.cdf(0.0)
        return across_atom(q, self.inclusion, below, self._slab.icdf)


class OrderedProbit(dist.CategoricalProbs):
    r"""Classes in order, from 0 to K - 1: the intervals of a Normal variate between cut points.

    .. math:: P(y \le k) = \Phi(c_k - f).

    NumPyro has the same with a logistic variate, ``OrderedLogistic``. Log probabilities keep their
    digits in both tails.

    :param predictor: f, the mean of the variate, whose variance is 1; of the shape of the batch.
    :param cutpoints: :math:`c_0 < \dots < c_{K - 2}`, shape (..., K - 1).
    :raises ValueError: with ``validate_args``, if cut points are not in order.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro_spikeslab as nss
        >>> print(nss.OrderedProbit(0.5, jnp.array([-0.5, 0.5])).probs.round(2))
        [0.16 0.34 0.5 ]
    """

    arg_constraints = {"predictor": constraints.real, "cutpoints": constraints.ordered_vector}

    def __init__(
        self, predictor: ArrayLike, cutpoints: ArrayLike, *, validate_args: bool | None = None
    ) -> None:
        self.cutpoints = jnp.asarray(cutpoints, jnp.result_type(cutpoints, float))
        batch = jnp.broadcast_shapes(jnp.shape(predictor), self.cutpoints.shape[:-1])
        self.predictor = jnp.broadcast_to(predictor, batch)
        f, ends = self.predictor[..., None], self._ends()
        logs = truncated_normal.log_prob_between(ends[..., :-1] - f, ends[..., 1:] - f)
        super().__init__(jnp.exp(logs), validate_args=validate_args)

    def _ends(self):
        sides = [(0, 0)] * (self.cutpoints.ndim - 1) + [(1, 1)]
        return jnp.pad(self.cutpoints, sides, constant_values=(-jnp.inf, jnp.inf))

    def between(self, value):
        """Return the cut points below and above classes, infinite beside the outer ones."""
        shape = jnp.broadcast_shapes(jnp.shape(value), self.cutpoints.shape[:-1])
        classes = jnp.broadcast_to(jnp.asarray(value, int), shape)[..., None]
        ends = jnp.broadcast_to(self._ends(), (*shape, self.cutpoints.shape[-1] + 2))
        low, high = (jnp.take_along_axis(ends, classes + k, axis=-1)[..., 0] for k in (0, 1))
        return low, high

    @validate_sample
    def log_prob(self, value):
        """Compute the log probabilities of classes."""
        low, high = self.between(value)
        return truncated_normal.log_prob_between(low - self.predictor, high - self.predictor)


class Sorted(dist.Distribution):
    """Independent numbers of one distribution, in increasing order.

    :param base: the distribution, expanded to their number.
    """

    support = constraints.ordered_vector
    pytree_data_fields = ("base",)

    def __init__(self, base: dist.Distribution) -> None:
        self.base = base
        super().__init__(base.batch_shape[:-1], base.batch_shape[-1:])

    def sample(self, key, sample_shape=()):
        """Draw numbers, and sort them."""
        return jnp.sort(self.base.sample(key, sample_shape), axis=-1)

    @validate_sample
    def log_prob(self, value):
        """Compute the log density; each order of draws has the same."""
        orders = gammaln(self.event_shape[0] + 1.0)
        return orders + jnp.sum(self.base.log_prob(value), axis=-1)


class HereditarySpikes(dist.BernoulliProbs):
    """Spikes that are Bernoulli where their parents allow it, and else 0; the log density of each
    is that given its parents.

    :param probs: probabilities of G spikes, shape (G,).
    :param heredity: their :class:`~numpyro_spikeslab.algebra.heredity.Heredity`.
    """

    pytree_aux_fields = ("heredity",)

    def __init__(self, probs: Any, heredity: Any) -> None:
        self.heredity = heredity
        super().__init__(jnp.broadcast_to(jnp.asarray(probs), (len(heredity.parents),)))

    def sample(self, key, sample_shape=()):
        """Draw spikes, shape ``sample_shape`` and (G,)."""
        return self.heredity.allowed(super().sample(key, sample_shape))

    def log_prob(self, value):
        """Compute the log probability of each spike given its parents."""
        allowed = self.heredity.missing(value) <= 0
        return dist.BernoulliProbs(jnp.where(allowed, self.probs, 0.0)).log_prob(value)


class GaussianFunctions(dist.Distribution):
    r"""M independent Gaussian functions: each its prior, times
    :math:`\exp(h^\top \phi - \tfrac12 \phi^\top \mathrm{diag}(\alpha) \phi)`.

    :param covariances: M stacked prior covariances of :mod:`numpyro_spikeslab.algebra`.
    :param mu: prior means, shape (M, N).
    :param alpha: site precisions, shape (M, N); zeros for the prior.
    :param h: site linear terms, shape (M, N).
    """

    arg_constraints = {
        "mu": constraints.real_vector,
        "alpha": constraints.independent(constraints.nonnegative, 1),
        "h": constraints.real_vector,
    }
    reparametrized_params = ["mu", "alpha", "h"]
    pytree_data_fields = ("covariances", "mu", "alpha", "h")
    support = constraints.real_vector

    def __init__(
        self, covariances: Any, mu: Any, alpha: Any, h: Any, *, validate_args: bool | None = None
    ) -> None:
        self.covariances, self.mu, self.alpha, self.h = covariances, mu, alpha, h
        super().__init__(mu.shape[:-1], mu.shape[-1:], validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        """Draw values of the functions, shape ``(*sample_shape, M, N)``."""
        assert is_prng_key(key)
        M, size = self.mu.shape[0], prod(sample_shape)
        keys = random.split(key, (M, size))

        def draw(keys, *one):
            return jax.vmap(lambda key: gp.sample(key, *one))(keys)

        draws = jax.vmap(draw)(keys, self.covariances, self.alpha, self.h, self.mu)
        return jnp.moveaxis(draws, 0, 1).reshape(*sample_shape, *self.mu.shape)

    @validate_sample
    def log_prob(self, value):
        """Compute the log density of each function's values, shape (M,)."""
        one = jax.vmap(gp.log_density)
        batch = value.reshape(-1, *self.mu.shape)
        logs = jax.vmap(lambda x: one(self.covariances, self.alpha, self.h, x, self.mu))(batch)
        return logs.reshape(value.shape[:-1])

    @property
    def _posterior(self) -> gp.FunctionPosterior:
        return jax.vmap(gp.condition)(self.covariances, self.alpha, self.h, self.mu)

    @property
    def mean(self):
        """Means at the inputs, shape (M, N)."""
        return self._posterior.mean

    @property
    def variance(self):
        """Variances at the inputs, shape (M, N)."""
        return self._posterior.variance
