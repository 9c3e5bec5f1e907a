# SPDX-License-Identifier: Apache-2.0
"""Rows whose noise is correlated, as combinations of rows in which it is not."""

from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers

ROUNDED = 1e-6
"""Largest difference of a covariance from its transpose, and of a negative eigenvalue from 0, that
count as rounding, relative to the largest number."""


class Background(NamedTuple):
    """Combinations of rows in which a background of many small effects is independent.

    - **eigenvalues** - variances of the background in the N - 1 combinations; their mean is 1.
    - **rows** - the combinations, shape (N - 1, N). Each sums to 0, so none has an intercept.
    - **unit** - what the covariance of the rows was divided by.
    """

    eigenvalues: Float[np.ndarray, " L"]
    rows: Float[np.ndarray, "L N"]
    unit: float

    def rotate(self, values: Float[np.ndarray, "N *P"]) -> Float[np.ndarray, "L *P"]:
        """Return the combinations of the rows of a table or a response."""
        return self.rows @ values


def background(covariance: Any, weights: Any = None) -> Background:
    r"""Rotate rows so that a background of many small effects is independent noise.

    In :math:`y = X w + g + e` with :math:`g \sim \mathcal{N}(0, \tau^2 K)` and noise e of the scale
    :math:`\sigma` few weights are large, and g is what many small effects or related rows share.
    :math:`K = X X^\top` if each column has a small effect, too. Rotated row n has noise of the
    variance :math:`\sigma^2 + \tau^2 \lambda_n`, with the n-th eigenvalue of K, and
    :class:`~numpyro_spikeslab.PairedGibbs` draws both scales. An intercept with a flat prior is
    integrated out: leave it out of the model, or add what else does not sum to 0 as a column.

    :param covariance: K up to a factor, shape (N, N). It is scaled so that :math:`\tau` is the
        standard deviation of g.
    :param weights: precisions of the noise of rows up to a factor, shape (N,), all 1 by default.
    :raises ValueError: if the covariance is not square, not symmetric, negative in some direction
        or the same for all rows.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> import numpyro_spikeslab as nss
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(100, 50))
        >>> y = 3.0 + X @ rng.normal(scale=0.1, size=50) + 2 * X[:, 7] + 0.5 * rng.normal(size=100)
        >>> parts = nss.background(X @ X.T)
        >>> def model(X, y):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.05)
        ...     scale = jnp.sqrt(sigma**2 + tau**2 * parts.eigenvalues)
        ...     numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)
        >>> mcmc = MCMC(
        ...     nss.PairedGibbs(model), num_warmup=200, num_samples=500, progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(0), parts.rotate(X), parts.rotate(y))
        >>> np.flatnonzero(mcmc.get_samples()["w_spike"].mean(0) > 0.5)
        array([7])
    """
    K = as_numbers("covariance", covariance)
    if K.ndim != 2 or K.shape[0] != K.shape[1] or len(K) < 3:
        raise bad("covariance", f"the shape {K.shape}", "(N, N), three rows or more")
    gap = abs(K - K.T)
    if gap.max() > ROUNDED * abs(K).max():
        i, j = np.unravel_index(gap.argmax(), K.shape)
        got = f"{K[i, j]:g} in row {i}, column {j}, and {K[j, i]:g} in row {j}, column {i}"
        raise bad("covariance", got, "a symmetric matrix")
    weights = np.ones(len(K)) if weights is None else np.asarray(weights, float)
    values, vectors = np.linalg.eigh(contrasts(contrasts(K + K.T, weights).T, weights) / 2)
    if values[0] < -ROUNDED * values[-1]:
        got = f"the eigenvalue {values[0]:.3g} beside {values[-1]:.3g}"
        raise bad("covariance", got, "none below 0", "No differences of rows vary by less.")
    unit = float(np.mean(values))
    if unit <= ROUNDED * abs(K).max():
        raise bad("covariance", "the same for all rows", "rows that differ")
    rows = vectors.T @ contrasts(np.eye(len(K)), weights)
    return Background(np.maximum(values, 0) / unit, rows, unit)


def contrasts(
    values: Float[np.ndarray, "N *P"], weights: Float[np.ndarray, " N"]
) -> Float[np.ndarray, "N-1 *P"]:
    """Compute Helmert contrasts: subtract from each row the mean of the rows above, and scale.

    Their likelihood is marginal over a flat intercept. N centred rows would count one observation
    too many, and let the noise vanish once N - 1 columns are included.
    """
    weights = weights.reshape(-1, *[1] * (values.ndim - 1))
    total = np.cumsum(weights, axis=0)
    above = np.cumsum(weights * values, axis=0)[:-1] / total[:-1]
    return (values[1:] - above) * np.sqrt(weights[1:] * total[:-1] / total[1:])
