# SPDX-License-Identifier: Apache-2.0
"""Sparse regression as a plain NumPyro model."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_spikeslab.models.primitives import spike_slab
from numpyro_spikeslab.models.responses import WIDE, response_kind


def sparse_regression(
    *,
    noise_scale: float = 1.0,
    slab_scale: float = 1.0,
    inclusion: tuple[ArrayLike, ArrayLike] = (1.0, 9.0),
    probabilities: ArrayLike | None = None,
    groups: Sequence[int] | None = None,
    heredity: Any = None,
    likelihood: str = "normal",
    num_levels: int = 2,
) -> Callable[..., Any]:
    r"""Make a sparse regression of a response on standardised columns.

    :math:`y_n \sim \mathcal{N}(\sum_p x_{np} w_p, \sigma^2)` with spike-and-slab weights. The sites
    are ``sigma`` and ``slab_scale``, with HalfNormal priors, ``inclusion``, with a Beta prior,
    ``w_spike``, ``w_slab`` and ``w``, shape (P,), and ``y``, shape (N,). The plates are ``feature``
    and ``row``. :func:`numpyro_spikeslab.sparse_regression` standardises, fits and samples it.

    Other likelihoods have, with the predictor :math:`f_n = o_n + b + \sum_p x_{np} w_p`, which has
    the intercept b with the prior :math:`\mathcal{N}(0, 10^2)`:

    ======================== =========================================================
    ``"logit"``              ``Bernoulli(logits=f)``
    ``"probit"``             ``Bernoulli(probs=ndtr(f))``
    ``"binomial"``           ``Binomial(totals, logits=f)``
    ``"ordered"``            ``OrderedLogistic(f, cutpoints)``, without an intercept; under the
                             prior of ``cutpoints`` all probabilities of the levels are alike at the
                             predictor 0: ``Dirichlet(1, ..., 1)``
    ``"ordered_probit"``     :class:`~numpyro_spikeslab.OrderedProbit` likewise
    ``"poisson"``            ``Poisson(exp(f))``
    ``"negative_binomial"``  ``NegativeBinomial2(exp(f), concentration)``, with
                             ``concentration`` from ``LogNormal(0, 2)``
    ``"student"``            ``StudentT(dof, f, sigma)``, with ``dof`` from ``Gamma(2, 0.1)``
    ``"weibull"``            ``Weibull(exp(f), 1 / sigma)``
    ``"lognormal"``          ``LogNormal(f, sigma)``
    ``"loglogistic"``        the exponential of ``Logistic(f, sigma)``
    ``"exponential"``        ``Exponential(exp(-f))``
    ``"cox"``                times whose hazard is ``exp(f + log_hazard[j])`` in the piece j of
                             time, with ``log_hazard`` from ``Normal(0, 10)``, without an intercept
    ======================== =========================================================

    :class:`~numpyro_spikeslab.PairedGibbs` draws all sites but ``concentration``, ``cutpoints``,
    ``dof``, ``log_hazard``, and ``sigma`` of other likelihoods than Normal, which need NUTS beside
    it. Where more than half of the responses of a Student-t likelihood are equal, the posterior is
    improper.

    :param noise_scale: scale of the HalfNormal prior of ``sigma``. The default is weak, since the
        noise of a standardised response is at most about 1.
    :param slab_scale: scale of the HalfNormal prior of the slab's standard deviation, likewise.
    :param inclusion: concentrations of the Beta prior of the inclusion probability. By default
        one column in ten is expected to matter.
    :param probabilities: instead of the site ``inclusion``, prior inclusion probabilities, shape
        (P,), or (G,) with ``groups``.
    :param groups: the number of each column's group, see :func:`~numpyro_spikeslab.spike_slab`.
    :param heredity: the parents of interactions, likewise.
    :param likelihood: a name above, or ``"normal"``.
    :param num_levels: number K of levels of an ordered likelihood, whose responses are 0 to K - 1.
    :return: ``model(X, y=None, always=None, offset=None, totals=1, upper=None, breaks=(),
        mask=True, count=None, effects=None, background=None)`` with ``X`` of shape (N, P) and ``y``
        of shape (N,). ``always`` are columns without spikes, shape (N, A); their weights are the
        site ``always``, shape (A,), with the prior :math:`\mathcal{N}(0, 10^2)`. ``offset`` is
        added to the predictor, and ``totals`` are the trials of Binomial observations. Times lie
        between ``y`` and ``upper``, by default at ``y``; ``breaks``, shape (J - 1,), are the ends
        of all pieces of constant hazard but the last. Rows where the boolean ``mask`` is false are
        no observations, and the others count ``count`` times, once by default. ``effects`` are
        columns of the levels of groups by name, such as indicators, shape (N, G); the site
        ``effect_NAME``, shape (G,), has their weights with the prior
        :math:`\mathcal{N}(0, \tau^2)`, and ``sd_NAME`` the scale, with a HalfNormal prior of scale
        1. ``background`` are the ``eigenvalues`` of :func:`numpyro_spikeslab.background`, which has
        rotated all rows of a Normal response. It adds the sites ``background_scale``, with the
        prior of ``sigma``, and ``variance_share``: of columns, background and noise.
    :raises ValueError: if there is no such likelihood.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import Predictive
        >>> import numpyro_spikeslab as nss
        >>> prior = Predictive(nss.models.sparse_regression(), num_samples=2)
        >>> prior(jax.random.key(0), jnp.ones((5, 3)))["y"].shape
        (2, 5)
    """
    kind = response_kind(likelihood)

    def model(
        X,
        y=None,
        always=None,
        offset=None,
        totals=1,
        upper=None,
        breaks=(),
        mask=True,
        count=None,
        effects=None,
        background=None,
    ):
        size = num_levels if kind.along == "level" else len(breaks) + 1
        priors = kind.sites(noise_scale, size)
        sites = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        slab = numpyro.sample("slab_scale", dist.HalfNormal(slab_scale))
        pi = probabilities
        if pi is None:
            pi = numpyro.sample("inclusion", dist.Beta(*inclusion))
        with numpyro.plate("feature", X.shape[1]) if groups is None else nullcontext():
            w = spike_slab("w", pi, slab, groups=groups, heredity=heredity)
        f = X @ w
        if kind.has_intercept:
            f += numpyro.sample("intercept", dist.Normal(0.0, WIDE))
        if always is not None:
            with numpyro.plate("always_feature", always.shape[1]):
                f += always @ numpyro.sample("always", dist.Normal(0.0, WIDE))
        for name, columns in (effects or {}).items():
            scale = numpyro.sample(f"sd_{name}", dist.HalfNormal(1.0))
            with numpyro.plate(f"level_{name}", columns.shape[1]):
                f += columns @ numpyro.sample(f"effect_{name}", dist.Normal(0.0, scale))
        if offset is not None:
            f += offset
        # NumPyro takes levels as integers alone
        y = jnp.asarray(y, int) if kind.along == "level" and y is not None else y
        if background is not None:
            tau = numpyro.sample("background_scale", dist.HalfNormal(noise_scale))
            variances = tau**2 * background + sites["sigma"] ** 2
            noise = sites["sigma"] ** 2 * jnp.sum(jnp.broadcast_to(mask, f.shape))
            parts = jnp.stack([jnp.sum(f**2), tau**2 * jnp.sum(background), noise])
            numpyro.deterministic("variance_share", parts / jnp.sum(parts))
            sites["sigma"] = jnp.sqrt(variances)
        beside = totals
        if kind.has_limits:
            # times that are drawn have no limits
            beside = jnp.inf if y is None else y if upper is None else upper
        if kind.along == "piece":
            sites["breaks"] = jnp.asarray(breaks, float)
        counted = nullcontext() if count is None else handlers.scale(scale=count)
        with numpyro.plate("row", X.shape[0]), handlers.mask(mask=mask), counted:
            numpyro.sample("y", kind.distribution(f, beside, **sites), obs=y)

    return model
