# SPDX-License-Identifier: Apache-2.0
"""The primitives of a model: spike-and-slab weights and latent functions."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import inf, prod
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import numpyro
import numpyro.distributions as dist
from numpyro.primitives import _PYRO_STACK, apply_stack
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.distributions import GaussianFunctions
from numpyro_spikeslab.kernel_priors import parameter_priors
from numpyro_spikeslab.latent import Functions, define

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
) -> Any:
    """Sample weights that are exactly zero or Normal: ``w = s * w_tilde`` (paper, eq. 3).

    Makes the sample sites ``{name}_spike`` (Bernoulli) and ``{name}_slab`` (the
    slab's Normal prior) and the deterministic site ``name``, their product. Both sites are marked
    in their ``infer`` dictionaries, which is how :class:`~numpyro_spikeslab.PairedGuide`,
    :class:`~numpyro_spikeslab.CAVI` and :class:`~numpyro_spikeslab.PairedGibbs` find them.

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
        ``numpy.unique(names, return_inverse=True)[1]`` turns names of groups into numbers.
    :return: the weights. Their shape is the broadcast shape of ``inclusion``, ``scale`` and the
        enclosing plates: the shape of the plates, if there are any. With ``groups``, (P,).
    :raises ValueError: if ``inclusion`` is outside (0, 1), ``scale`` is not positive, their shapes
        do not fit each other or the plates, not exactly one of ``inclusion`` and ``expected_size``
        is given, ``expected_size`` is not between 0 and the number of weights, or ``groups`` are
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
    if (inclusion is None) == (expected_size is None):
        raise ValueError(
            f"spike_slab({name!r}): give either `inclusion` or `expected_size`, not both or none."
        )
    if groups is not None:
        return _grouped(name, inclusion, scale, expected_size, groups)
    shape = _pair_shape(name, {"inclusion": inclusion, "scale": scale})
    if expected_size is not None:
        size = prod(_full_shape(shape))
        _require(name, "expected_size", expected_size, 0.0, float(size), "the number of weights")
        inclusion = jnp.asarray(expected_size) / size
    _require(name, "inclusion", inclusion, 0.0, 1.0, "a probability")
    _require(name, "scale", scale, 0.0, inf, "a standard deviation")
    if shape != _plate_shape():
        # a plate alone would expand both sites; here one spike would be shared by all its slabs
        inclusion, scale = (jnp.broadcast_to(jnp.asarray(x), shape) for x in (inclusion, scale))
    spike = numpyro.sample(
        f"{name}_spike", dist.Bernoulli(probs=inclusion), infer={MARK: (name, "spike")}
    )
    slab = numpyro.sample(f"{name}_slab", dist.Normal(0.0, scale), infer={MARK: (name, "slab")})
    return _recorded(name, weights(spike, slab))


def _recorded(name: str, w: Any) -> Any:
    """``numpyro.deterministic``, whose site also has what a handler may have put another value for:
    ``intermediates``, which NumPyro's control flow takes along."""
    site = {"type": "deterministic", "name": name, "value": w, "intermediates": [w]}
    return apply_stack(site | {"cond_indep_stack": []})["value"] if _PYRO_STACK else w


def _grouped(
    name: str, inclusion: Any, scale: Any, expected_size: Any, groups: Any
) -> Float[Array, " P"]:
    """Sample weights with one spike for each group."""
    index = _group_index(name, groups)
    G, P = int(index.max()) + 1, len(index)
    for argument, value, size in (("inclusion", inclusion, G), ("scale", scale, P)):
        if value is not None and jnp.shape(value) not in ((), (size,)):
            raise ValueError(
                f"spike_slab({name!r}): `{argument}` has shape {jnp.shape(value)}, expected a "
                f"number or shape ({size},), with {G} groups of {P} weights."
            )
    if expected_size is not None:
        _require(name, "expected_size", expected_size, 0.0, float(G), "the number of groups")
        inclusion = jnp.asarray(expected_size) / G
    _require(name, "inclusion", inclusion, 0.0, 1.0, "a probability")
    _require(name, "scale", scale, 0.0, inf, "a standard deviation")
    mark = {MARK: (name, "spike"), GROUPS: tuple(index.tolist())}
    with numpyro.plate(f"{name}_group", G):
        spike = numpyro.sample(f"{name}_spike", dist.Bernoulli(probs=inclusion), infer=mark)
    with numpyro.plate(f"{name}_weight", P):
        slab = numpyro.sample(f"{name}_slab", dist.Normal(0.0, scale), infer={MARK: (name, "slab")})
        return _recorded(name, weights(jnp.asarray(spike)[..., index], slab))


def _group_index(name: str, groups: Any) -> np.ndarray:
    """Return the group number of each weight."""
    if not all(map(not_jax_tracer, jax.tree.leaves(groups))):
        raise ValueError(
            f"spike_slab({name!r}): `groups` is traced by JAX, expected numbers that are known "
            "when the model is. Write a list or a numpy array in place of a jax.numpy one, or pass "
            "them as an argument of the model."
        )
    index = np.asarray(groups)
    is_list = index.ndim == 1 and index.size > 0 and np.issubdtype(index.dtype, np.integer)
    if not is_list or not np.array_equal(np.unique(index), np.arange(index.max() + 1)):
        raise ValueError(
            f"spike_slab({name!r}): `groups` must have one number for each weight, from 0 to the "
            f"number of groups less one, and all of these, got {groups!r:.100}. Make them with "
            "`numpy.unique(groups, return_inverse=True)[1]`."
        )
    if frames := _plates():
        raise ValueError(
            f"spike_slab({name!r}): with `groups` it stands inside of the plate "
            f"{frames[0].name!r}, expected none, for spikes and slabs differ in number. Move it "
            f"out of it; it makes the plates '{name}_group' and '{name}_weight' itself."
        )
    return index


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
    ``2.0 * kernels.ExpSquared(1.0)``. Fits start at the value in the kernel. A length scale has an
    InverseGamma prior with 1% of its mass below the spacing of the inputs (or a tenth of their
    extent, if that is less), where functions look like noise, and 5% above their extent (the
    diagonal of their box), where functions are nearly constant. Other parameters have LogNormal
    priors whose median is the value in the kernel and whose scale is 2. ``priors`` replaces both.
    The site has one entry for each function, shape (M,) before the parameter's own shape. If the
    kernels of a list have different parameters, there is a site ``{name}_{m}_{path}`` for each
    function instead. To fix a parameter, condition on it:
    ``handlers.condition(model, {"phi_scale": ...})``. Fields annotated as ``int``, such as the
    order of a ``Polynomial``, are always fixed.

    Covariances are dense matrices, so N is limited to some thousands, unless inputs have one
    dimension and all kernels are of one kind of ``tinygp.kernels.quasisep``: then time and memory
    are linear in N.

    :param name: name of the functions.
    :param kernels: a list of M kernels, or one kernel for all functions, whose number is then the
        size of the enclosing plate. Each is a tinygp kernel, an ``(N, N)`` covariance matrix,
        ``"white"`` (independent values, as in factor analysis) or ``"zero"`` (no deviation from the
        mean). If all are ``"zero"``, the functions are a deterministic site and the model is a
        linear one. For inputs in several dimensions, give tinygp's kernels
        ``distance=tinygp.kernels.distance.L2Distance()``: with
        their default, the sum of distances, only the exponential kernel is a covariance.
    :param X: inputs, real numbers of shape (N,) or (N, D), in the unit of the kernels' scales.
    :param mean: prior means, shape (M, N) or (N,), or a function that maps inputs to them. The
        default is zero.
    :param priors: priors of kernel parameters by their path, for example
        ``{"scale": dist.InverseGamma(3.0, 1.0)}``, each on positive numbers. A prior holds for all
        functions with this parameter; where sites are numbered, ``{"0_scale": ...}`` addresses the
        first function alone. Its shape must broadcast to the site's shape: (M,) for a number,
        (M, D) for an array of shape (D,), without M where sites are numbered. Parameters without an
        entry keep the default.
    :return: the functions' values, shape (M, N).
    :raises ValueError: if there are no functions or inputs, the number of kernels differs from the
        plate's size, the inputs are dates, not finite numbers or equal after rounding, a kernel
        does not accept them, a matrix or a stationary kernel is not a covariance of the inputs, all
        kernels are ``"zero"`` without ``mean``, or a prior names no parameter, is not on positive
        numbers or has another shape.

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

    With a prior that keeps length scales away from zero:

    .. doctest::

        >>> import numpyro.distributions as dist
        >>> def model(X):
        ...     kernel, scale = kernels.ExpSquared(2.0), dist.InverseGamma(3.0, 1.0)
        ...     return nss.latent_functions("phi", [kernel] * 3, X, priors={"scale": scale})
        >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(jnp.ones(5))
        >>> type(trace["phi_scale"]["fn"].base_dist).__name__, trace["phi_scale"]["value"].shape
        ('InverseGamma', (3,))
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
    """Sample functions as :func:`latent_functions`; also return their definition and the values of
    the kernels' parameters.

    :param point: ArviZ's name for the dimension of the inputs, by default ``{name}_point``.
    """
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
        raise ValueError(
            f"latent_functions({name!r}): kernels with different parameters cannot stand inside "
            f"the plate {inner.name!r}. Move latent_functions out of it; it makes its own plate."
        )
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


def _plate_shape() -> tuple[int, ...]:
    """Batch shape of the enclosing plates, with 1 at dimensions between them."""
    sizes = {plate.dim: plate.subsample_size for plate in _plates()}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


def _pair_shape(name: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Broadcast the shapes of the arguments and the enclosing plates.

    :raises ValueError: if an argument does not fit the others or the plates.
    """
    shape = plates = _plate_shape()
    for argument, value in arguments.items():
        if value is None:
            continue
        try:
            shape = jnp.broadcast_shapes(shape, jnp.shape(value))
            fits = all(shape[plate.dim] == plate.subsample_size for plate in _plates())
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"spike_slab({name!r}): `{argument}` has shape {jnp.shape(value)}, which does not "
                f"fit the other argument and the enclosing plates, of shape {plates}."
            )
    return shape


def _full_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape before the plates take a subsample."""
    full = list(shape)
    for plate in _plates():
        full[plate.dim] = plate.size
    return tuple(full)


def weights(spike: ArrayLike, slab: ArrayLike) -> Any:
    """Compute ``w = s * w_tilde``, without the negative zeros of a product."""
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
