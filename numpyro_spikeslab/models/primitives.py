# SPDX-License-Identifier: Apache-2.0
"""The primitives of a model: spike-and-slab weights and latent functions."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import inf, prod
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import numpyro
import numpyro.distributions as dist
from numpyro.primitives import _PYRO_STACK, apply_stack
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.models.distributions import GaussianFunctions, HereditarySpikes
from numpyro_spikeslab.models.functions import Functions, define, user_of
from numpyro_spikeslab.models.kernel_priors import parameter_priors
from numpyro_spikeslab.support.messages import bad

MARK = "spike_slab"
"""Key in the ``infer`` dictionary of both sites of a pair; its value is ``(name, part)``."""

GROUPS = "groups"
"""Key in the ``infer`` dictionary of a spike that several weights share; its value is a tuple with
the number of each weight's group."""

FUNCTIONS_MARK = "latent_functions"
"""Key in the ``infer`` dictionary of latent functions; its value is their :class:`Functions`."""

ENTRIES_MARK = "entries"
"""Key of rows and columns in the ``infer`` dictionary of a site whose observations are entries of a
table, of N points and Q tasks."""


def spike_slab(
    name: str,
    inclusion: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    *,
    expected_size: ArrayLike | None = None,
    groups: Sequence[int] | ArrayLike | None = None,
    heredity: Any = None,
) -> Any:
    """Sample weights that are exactly zero or Normal: ``w = s * w_tilde`` (paper, eq. 3).

    Makes the sample sites ``{name}_spike`` (Bernoulli) and ``{name}_slab`` (Normal) and the
    deterministic site ``name``, their product. Marks in their ``infer`` dictionaries tell guides
    and kernels that they are a pair.

    :param name: name of the weights.
    :param inclusion: prior probability ``pi`` that a weight is nonzero, in (0, 1). A float, an
        array (one per weight) or the value of another latent site.
    :param scale: standard deviation ``sigma_w`` of the slab, positive, in the same forms. The
        default, 1, suits standardised features and responses.
    :param expected_size: instead of ``inclusion``, the prior expected number of nonzero weights
        among all the weights of this call; with ``groups``, of included groups.
    :param groups: for each of P weights the number of its group, from 0 to G - 1, such as
        ``[0, 1, 1, 1]`` for a number and a factor of three dummies. The weights of a group share
        one spike, ``{name}_spike`` of shape (G,), so they are included together, each with a slab
        of its own. ``inclusion`` is then a number or has shape (G,), ``scale`` a number or shape
        (P,), and the call makes its own plates, ``{name}_group`` and ``{name}_weight``.
    :param heredity: for interactions, which spikes need which others, an object of
        ``numpyro_spikeslab.algebra.heredity``. ``inclusion`` is then the probability given that the
        parents of a weight allow it. Only :class:`~numpyro_spikeslab.PairedGibbs` draws such
        weights, of shape (P,).
    :return: the weights. Their shape is the broadcast shape of ``inclusion``, ``scale`` and the
        enclosing plates. With ``groups``, (P,).
    :raises ValueError: if an argument is out of its range, shapes do not fit each other or the
        plates, not exactly one of ``inclusion`` and ``expected_size`` is given, or ``groups`` are
        not such numbers or are used inside a plate.

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
    user = f"spike_slab({name!r})"
    if (inclusion is None) == (expected_size is None):
        got = "neither" if inclusion is None else "both"
        raise bad(f"{user}: inclusion, expected_size", got, "one of them")
    if groups is None:
        index, shape, around = None, *_shape_of_pairs(user, inclusion, scale)
        plates = _plates()
        # the number before the plates take a subsample
        size = prod(shape) * prod(x.size for x in plates) // prod(x.subsample_size for x in plates)
    else:
        index, size = _group_index(user, groups, inclusion, scale)
    if expected_size is not None:
        what = "weights" if index is None else "groups"
        remedy = "" if size > 1 else "Sample it in `numpyro.plate('feature', X.shape[1])`."
        why = f"the number of {what}"
        _require(f"{user}: expected_size", expected_size, size, why, remedy)
        inclusion = jnp.asarray(expected_size) / size
    always = "A weight that is always in is a Normal site; leave out a column that never is."
    _require(f"{user}: inclusion", inclusion, 1, "a probability", always)
    _require(f"{user}: scale", scale, inf, "a standard deviation")
    infer = {MARK: (name, "spike")}
    of_spikes, of_slabs = nullcontext(), nullcontext()
    if index is not None:
        infer[GROUPS] = tuple(index.tolist())
        of_spikes = numpyro.plate(f"{name}_group", size)
        of_slabs = numpyro.plate(f"{name}_weight", len(index))
    elif shape != around:
        # a plate alone would expand both sites; here one spike would be shared by all its slabs
        inclusion, scale = (jnp.broadcast_to(jnp.asarray(x), shape) for x in (inclusion, scale))
    alone = dist.Bernoulli(probs=inclusion)
    prior = alone if heredity is None else HereditarySpikes(inclusion, heredity)
    with of_spikes:
        spike = numpyro.sample(f"{name}_spike", prior, infer=infer)
    with of_slabs:
        slab = numpyro.sample(f"{name}_slab", dist.Normal(0.0, scale), infer={MARK: (name, "slab")})
        if index is not None:
            spike = jnp.asarray(spike)[..., index]
        # what `numpyro.deterministic` does; the intermediates show a value that a handler has put
        # in, and NumPyro's control flow takes them along
        w = weights(spike, slab)
        site = {"type": "deterministic", "name": name, "value": w, "intermediates": [w]}
        return apply_stack(site | {"cond_indep_stack": []})["value"] if _PYRO_STACK else w


def _shape_of_pairs(user: str, inclusion: Any, scale: Any) -> tuple[tuple[int, ...], ...]:
    """Broadcast the shapes of the arguments and the enclosing plates; return also the latter."""
    sizes = {plate.dim: plate.subsample_size for plate in _plates()}
    around = tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))
    shapes = [jnp.shape(x) for x in (inclusion, scale) if x is not None]
    try:
        shape = jnp.broadcast_shapes(around, *shapes)
        fits = all(shape[dim] == size for dim, size in sizes.items())
    except ValueError:
        fits = False
    if not fits:
        expected = f"shapes that fit each other and the enclosing plates, {around}"
        raise bad(f"{user}: inclusion, scale", f"shapes {shapes}", expected)
    return shape, around


def _group_index(call: str, groups: Any, inclusion: Any, scale: Any) -> tuple[np.ndarray, int]:
    """Return the group number of each weight, and the number of groups, which fit the others."""
    user = f"{call}: groups"
    if not all(map(not_jax_tracer, jax.tree.leaves(groups))):
        remedy = "Write a list or a numpy array, or pass them as an argument of the model."
        raise bad(user, "numbers traced by JAX", "numbers known when the model is", remedy)
    index = np.asarray(groups)
    is_list = index.ndim == 1 and index.size > 0 and np.issubdtype(index.dtype, np.integer)
    if not is_list or not np.array_equal(np.unique(index), np.arange(index.max() + 1)):
        expected = "for each weight a number from 0 to the number of groups less one, all of them"
        remedy = "Make them with `numpy.unique(groups, return_inverse=True)[1]`."
        raise bad(user, f"{groups!r:.100}", expected, remedy)
    if plates := _plates():
        remedy = "Move it out of the plate; it makes plates of its own."
        raise bad(user, f"the enclosing plate {plates[0].name!r}", "no plate", remedy)
    size = int(index.max()) + 1
    for argument, value, number in ("inclusion", inclusion, size), ("scale", scale, len(index)):
        if value is not None and jnp.shape(value) not in ((), (number,)):
            expected = f"a number or shape ({number},), with {size} groups"
            raise bad(f"{call}: {argument}", f"shape {jnp.shape(value)}", expected)
    return index, size


def latent_functions(
    name: str,
    kernels: Any,
    X: Any,
    mean: Any = None,
    *,
    priors: Mapping[str, dist.Distribution] | None = None,
) -> Any:
    r"""Sample M latent functions with Gaussian process priors at N inputs.

    Makes the sample site ``name`` with M functions along the innermost plate and the event shape
    (N,), :math:`\phi_m \sim \mathcal{N}(\mu_m, K_m + \epsilon I)`. The jitter
    :math:`\epsilon` is ``max(1e-9, 4 N eps)`` times the largest entry of :math:`K_m`. Without an
    enclosing plate it makes the plate ``latent``.

    Each positive number inside a kernel is a parameter to be learned: the sample site
    ``{name}_{path}``, such as ``phi_scale``, or ``phi_kernel1_value`` and ``phi_kernel2_scale`` for
    ``2.0 * kernels.ExpSquared(1.0)``. Fits start at the value in the kernel. A length scale has a
    LogNormal prior with 1% of its mass below the spacing of the inputs (or a tenth of their
    extent, if that is less), where functions look like noise, and 5% above their extent (the
    diagonal of their box), where functions are nearly constant. Other parameters have LogNormal
    priors whose median is the value in the kernel and whose scale is 2. ``priors`` replaces both.
    The site has one entry for each function, shape (M,) before the parameter's own shape. If the
    kernels of a list have different parameters, there is a site ``{name}_{m}_{path}`` for each
    function instead. To fix a parameter, condition on it:
    ``handlers.condition(model, {"phi_scale": ...})``. Fields annotated as ``int`` are fixed.

    Covariances are dense matrices, so N is limited to some thousands, unless inputs have one
    dimension and all kernels are of one kind of ``tinygp.kernels.quasisep``: then time and memory
    are linear in N.

    :param name: name of the functions.
    :param kernels: a list of M kernels, or one kernel for all functions, whose number is then the
        size of the enclosing plate. Each is a tinygp kernel, an ``(N, N)`` covariance matrix,
        ``"white"`` (independent values, as in factor analysis) or ``"zero"`` (no deviation from the
        mean). If all are ``"zero"``, the functions are a deterministic site and the model is a
        linear one. For inputs in several dimensions, give tinygp's kernels
        ``distance=tinygp.kernels.distance.L2Distance()``: by their default, the sum of distances,
        only the exponential kernel is a covariance.
    :param X: inputs, real numbers of shape (N,) or (N, D), in the unit of the kernels' scales.
    :param mean: prior means, shape (M, N) or (N,), or a function that maps inputs to them. The
        default is zero.
    :param priors: priors of kernel parameters by their path, for example
        ``{"scale": dist.InverseGamma(3.0, 1.0)}``, each on positive numbers. A prior holds for all
        functions with this parameter; where sites are numbered, ``{"0_scale": ...}`` addresses the
        first function alone. Its shape must broadcast to the site's shape: (M,) for a number,
        (M, D) for an array of shape (D,), without M where sites are numbered.
    :return: the functions' values, shape (M, N).
    :raises ValueError: if there are no functions or inputs, the number of kernels differs from the
        plate's size, the inputs are not finite real numbers or equal after rounding, a kernel does
        not accept them or is no covariance of them, all kernels are ``"zero"`` without ``mean``, or
        a prior names no parameter, is not on positive numbers or has another shape.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro
        >>> from tinygp import kernels
        >>> import numpyro_spikeslab as nss
        >>> def model(X):
        ...     return nss.latent_functions("phi", [kernels.ExpSquared(2.0)] * 3, X)
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     model(jnp.linspace(0, 1, 5)).shape
        (3, 5)
    """
    return sample_functions(name, kernels, X, mean, priors)[0]


def sample_functions(
    name: str,
    kernels: Any,
    X: Any,
    mean: Any = None,
    priors: Mapping[str, dist.Distribution] | None = None,
    point: str | None = None,
) -> tuple[Any, Functions, dict[str, Any]]:
    """Sample functions, of inputs of dimension ``point`` in ArviZ; return also their definition and
    the values of the kernels' parameters."""
    inner = max(_plates(), key=lambda plate: plate.dim, default=None)
    functions = define(name, kernels, X, mean, None if inner is None else inner.size)
    site_priors = parameter_priors(functions, priors or {})
    M = len(functions.templates)
    plate = numpyro.plate("latent", M) if inner is None else nullcontext()
    mu = functions.mean_at(functions.X)
    kinds, shared = functions.kinds, functions.parameters.are_shared
    if kinds == {"zero"}:
        with plate:
            return numpyro.deterministic(name, mu), functions, {}
    if not shared and inner is not None:
        remedy = "Move latent_functions out of it; it makes its own plate."
        got = f"different parameters inside the plate {inner.name!r}"
        raise bad(f"{user_of(name)}: kernels", got, "kernels with the same ones", remedy)
    with plate if shared else nullcontext():
        sites = {site: numpyro.sample(site, prior) for site, prior in site_priors.items()}
    if kinds == {"white"}:
        prior: dist.Distribution = dist.Normal(mu, 1.0).to_event(1)
    elif kinds == {"quasisep"} and functions.is_uniform:
        zero = jnp.zeros_like(mu)
        prior = GaussianFunctions(functions.covariances(sites), mu, zero, zero)
    else:
        K = functions.covariances(sites).K
        # NumPyro cannot check a tracer, but would compile the check
        checked = None if not_jax_tracer(K) else False
        prior = dist.MultivariateNormal(mu, covariance_matrix=K, validate_args=checked)
    with plate:
        infer = {FUNCTIONS_MARK: functions, "event_dims": (point or f"{name}_point",)}
        phi = numpyro.sample(name, prior, infer=infer)
    return phi, functions, sites


def _plates() -> list[Any]:
    return [frame for frame in _PYRO_STACK if isinstance(frame, numpyro.plate)]


def weights(spike: ArrayLike, slab: ArrayLike) -> Any:
    """Compute ``w = s * w_tilde``, without the negative zeros of a product."""
    return jnp.where(jnp.asarray(spike, bool), slab, 0.0)


def _require(what: str, value: Any, high: float | int, why: str, remedy: str = "") -> None:
    """Raise unless a concrete value lies strictly between 0 and ``high``."""
    if not not_jax_tracer(value):
        return
    # numpy, because under a transformation jax.numpy makes tracers of constants
    value = np.asarray(value)
    if not np.all((value > 0) & (value < high)):
        raise bad(what, value, f"numbers strictly between 0 and {high}, {why}", remedy)
