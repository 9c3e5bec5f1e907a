# SPDX-License-Identifier: Apache-2.0
"""What a model's author writes: spike-and-slab weights and latent functions."""

from contextlib import nullcontext
from math import inf, prod
import os
from typing import Any, NamedTuple

import numpy as np
from tinygp.kernels import Kernel

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

import numpyro
import numpyro.distributions as dist
from numpyro.primitives import _PYRO_STACK
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.algebra.covariance import Dense, add_jitter, as_matrix
from numpyro_spikeslab.algebra.kernels import Template
from numpyro_spikeslab.distributions import GaussianFunctions

MARK = "spike_slab"
"""Key in the ``infer`` dictionary of both sites of a pair; its value is ``(name, part)``."""


FUNCTIONS_MARK = "latent_functions"
"""Key in the ``infer`` dictionary of latent functions; its value is their :class:`Functions`."""


KERNEL_PRIOR_SCALE = 2.0
"""Scale of the LogNormal prior of a kernel parameter; its median is the value in the kernel."""


class Functions(NamedTuple):
    """What defines the prior of M latent functions.

    - **name** - name of their site.
    - **templates** - their M kernels.
    - **X** - the N inputs.
    - **mean** - prior mean: `None`, an array or a function of the inputs.
    - **sites** - names of the sites of the kernels' parameters: one for each parameter of the
      kernels where all are alike, else one for each function and parameter.
    - **alike** - whether all kernels have the same parameters.
    """

    name: str
    templates: tuple[Template, ...]
    X: Any
    mean: Any
    sites: tuple[tuple[str, ...], ...]
    alike: bool

    # NumPyro makes `infer` a part of a pytree's structure, which JAX compares; arrays have no truth
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def num_inputs(self) -> int:
        return jnp.shape(self.X)[0]

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for names in self.sites for name in names))

    def values(self, sites: dict[str, Any], m: int) -> list[Any]:
        """Values of the parameters of one kernel, from those of their sites."""
        return [sites[name][m] if self.alike else sites[name] for name in self.sites[m]]

    def mean_at(self, X: Any) -> Any:
        """Prior means at inputs, shape (M, S).

        :raises ValueError: if the mean is an array and the inputs are new, or for wrong shapes.
        """
        shape = (len(self.templates), jnp.shape(X)[0])
        if self.mean is None:
            return jnp.zeros(shape)
        if not callable(self.mean) and X is not self.X:
            raise ValueError(
                f"latent_functions({self.name!r}): the mean is an array, which says nothing about "
                "new inputs. Give `mean` as a function of the inputs."
            )
        mean = jnp.asarray(self.mean(X) if callable(self.mean) else self.mean, float)
        if mean.shape not in (shape, shape[1:], ()):
            raise ValueError(
                f"latent_functions({self.name!r}): `mean` has shape {mean.shape}, expected "
                f"{shape} or {shape[1:]}."
            )
        return jnp.broadcast_to(mean, shape)

    def covariance(self, sites: dict[str, Any], m: int) -> Any:
        """Prior covariance of one function at the inputs, with its jitter."""
        return self.templates[m].prior(self.values(sites, m), self.X, not self.is_uniform)

    @property
    def is_uniform(self) -> bool:
        """Whether the covariances of all functions have the same representation."""
        kinds = {template.kind for template in self.templates}
        if kinds == {"quasisep"}:
            return self.alike
        return len(kinds) == 1 or kinds == {"kernel", "matrix"}

    def covariances(self, sites: dict[str, Any]) -> Any:
        """Prior covariances of all functions at the inputs, stacked."""
        every = [self.covariance(sites, m) for m in range(len(self.templates))]
        return jax.tree.map(lambda *x: jnp.stack(x), *every)

    def conditional(self, sites: dict[str, Any], phi: Any, X_new: Any) -> dist.Distribution:
        """The functions at new inputs given their values at the inputs."""
        means, roots = [], []
        mean, mean_new = self.mean_at(self.X), self.mean_at(X_new)
        for m, template in enumerate(self.templates):
            values = self.values(sites, m)
            root = jnp.linalg.cholesky(as_matrix(self.covariance(sites, m)))
            cross = template.cross(values, self.X, X_new)
            half = solve_triangular(root, cross, lower=True)
            weights = solve_triangular(root, phi[m] - mean[m], lower=True)
            if template.kind in ("white", "zero"):
                left = jnp.diag(template.variance(values, X_new))
            else:
                left = template.cross(values, X_new, X_new)
            means.append(mean_new[m] + half.T @ weights)
            left = as_matrix(add_jitter(Dense(left - half.T @ half)))
            roots.append(jnp.linalg.cholesky(left))
        return dist.MultivariateNormal(jnp.stack(means), scale_tril=jnp.stack(roots))


def spike_slab(
    name: str,
    inclusion: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    *,
    expected_size: ArrayLike | None = None,
) -> Any:
    """Weights that are exactly zero or Normal: ``w = s * w_tilde`` (paper, eq. 3).

    Makes the sample sites ``{name}_spike`` (Bernoulli) and ``{name}_slab`` (the
    slab's Normal prior) and the deterministic site ``name``, their product. Both sites are marked
    in their ``infer`` dictionaries, which is how :class:`~numpyro_spikeslab.PairedGuide`,
    :class:`~numpyro_spikeslab.CAVI` and :class:`~numpyro_spikeslab.PairedGibbs` find them.

    :param name: name of the weights.
    :param inclusion: prior probability ``pi`` that a weight is not zero, in (0, 1). A float, an
        array (one per weight) or the value of another latent site.
    :param scale: standard deviation ``sigma_w`` of the slab, positive; likewise. Defaults to 1,
        which suits standardised features and responses.
    :param expected_size: instead of ``inclusion``, the prior expected number of nonzero weights
        among all the weights of this call.
    :return: the weights, one pair each, in the shape of ``inclusion``, ``scale`` and the enclosing
        plates broadcast against each other: that of the plates, where there are any.
    :raises ValueError: if ``inclusion`` is outside (0, 1) or ``scale`` is not positive, if their
        shapes do not fit each other or the plates, if not exactly one of ``inclusion`` and
        ``expected_size`` is given, or if ``expected_size`` is not between 0 and the number of
        weights.

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
    shape = _pair_shape(name, {"inclusion": inclusion, "scale": scale})
    if expected_size is not None:
        size = prod(_full_shape(shape))
        _require(name, "expected_size", expected_size, 0.0, float(size), "the number of weights")
        inclusion = jnp.asarray(expected_size) / size
    _require(name, "inclusion", inclusion, 0.0, 1.0, "a probability")
    _require(name, "scale", scale, 0.0, inf, "a standard deviation")
    if shape != _plate_shape():
        # what plates decide they also expand; a spike alone would be shared by all its slabs
        inclusion, scale = jnp.broadcast_to(inclusion, shape), jnp.broadcast_to(scale, shape)
    spike = numpyro.sample(
        f"{name}_spike", dist.Bernoulli(probs=inclusion), infer={MARK: (name, "spike")}
    )
    slab = numpyro.sample(f"{name}_slab", dist.Normal(0.0, scale), infer={MARK: (name, "slab")})
    return numpyro.deterministic(name, weights(spike, slab))


def latent_functions(name: str, kernels: Any, X: Any, mean: Any = None) -> Any:
    r"""M latent functions with Gaussian process priors, at N inputs.

    Makes the sample site ``name`` with M functions along the innermost plate and the event shape
    (N,), :math:`\phi_m \sim \mathcal{N}(\mu_m, K_m + \epsilon I)`. The jitter
    :math:`\epsilon` is ``max(1e-9, 4 N eps)`` times the largest entry of :math:`K_m`. Without an
    enclosing plate it makes the plate ``latent``.

    Each positive float inside a kernel is a parameter to be learned: the sample site
    ``{name}_{parameter}``, such as ``phi_scale``, with a LogNormal prior whose median is the value
    in the kernel and whose scale is 2, one for each function. Where the kernels of a list have
    different parameters, the sites are ``{name}_{m}_{parameter}``. To hold one, condition on it:
    ``handlers.condition(model, {"phi_scale": ...})``.

    Covariances are dense matrices, so N is limited to some thousands, unless inputs have one
    dimension and all kernels are of one kind of ``tinygp.kernels.quasisep``: then time and memory
    are linear in N.

    :param name: name of the functions.
    :param kernels: a list of M, or one for all functions, whose number the enclosing plate tells.
        Each is a tinygp kernel, an ``(N, N)`` covariance matrix, ``"white"`` (independent values,
        as in factor analysis) or ``"zero"`` (no deviation from the mean). If all are ``"zero"``,
        the functions are a deterministic site and the model is a linear one.
    :param X: inputs, shape (N,) or (N, D).
    :param mean: prior means, shape (M, N) or (N,), or a function that maps inputs to them. Zero if
        not given.
    :return: the functions' values, shape (M, N).
    :raises ValueError: if there are no functions or inputs, the number of kernels is not that of
        the plate, the inputs are not finite, a kernel does not take them, a matrix is not a
        covariance of the inputs, or the matrices need more memory than the machine has.

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
    return sample_functions(name, kernels, X, mean)[0]


def sample_functions(
    name: str, kernels: Any, X: Any, mean: Any = None, point: str | None = None
) -> tuple[Any, Functions, dict[str, Any]]:
    """:func:`latent_functions`, also what defines the functions and the kernels' parameters.

    :param point: ArviZ's name for the dimension of the inputs, ``{name}_point`` if not given.
    """
    inner = max(_plates(), key=lambda plate: plate.dim, default=None)
    functions = _functions(name, kernels, X, mean, None if inner is None else inner.size)
    M = len(functions.templates)
    plate = numpyro.plate("latent", M) if inner is None else nullcontext()
    mu = functions.mean_at(functions.X)
    kinds = {template.kind for template in functions.templates}
    if kinds == {"zero"}:
        with plate:
            return numpyro.deterministic(name, mu), functions, {}
    if not functions.alike and inner is not None:
        raise ValueError(
            f"latent_functions({name!r}): kernels with different parameters cannot stand inside "
            f"the plate {inner.name!r}. Move latent_functions out of it; it makes its own plate."
        )
    with plate if functions.alike else nullcontext():
        sites = _sample_parameters(functions)
    if kinds == {"white"}:
        prior: dist.Distribution = dist.Normal(mu, 1.0).to_event(1)
    elif kinds == {"quasisep"} and functions.is_uniform:
        zero = jnp.zeros_like(mu)
        prior = GaussianFunctions(functions.covariances(sites), mu, zero, zero)
    else:
        prior = dist.MultivariateNormal(mu, covariance_matrix=functions.covariances(sites).K)
    with plate:
        infer = {FUNCTIONS_MARK: functions, "event_dims": (point or f"{name}_point",)}
        phi = numpyro.sample(name, prior, infer=infer)
    return phi, functions, sites


def _sample_parameters(functions: Functions) -> dict[str, Any]:
    """Sample the parameters of the kernels."""
    sites: dict[str, Any] = {}
    if functions.alike:
        starts = [list(template.parameters.values()) for template in functions.templates]
        for k, name in enumerate(functions.sites[0]):
            start = jnp.stack([values[k] for values in starts])
            prior = dist.LogNormal(jnp.log(start), KERNEL_PRIOR_SCALE).to_event(start.ndim - 1)
            sites[name] = numpyro.sample(name, prior)
        return sites
    for template, names in zip(functions.templates, functions.sites, strict=True):
        for name, start in zip(names, template.parameters.values(), strict=True):
            prior = dist.LogNormal(jnp.log(start), KERNEL_PRIOR_SCALE).to_event(start.ndim)
            sites[name] = numpyro.sample(name, prior)
    return sites


def _functions(name: str, kernels: Any, X: Any, mean: Any, size: int | None) -> Functions:
    """Check the arguments of :func:`latent_functions`."""
    where = f"latent_functions({name!r})"
    if jnp.ndim(X) not in (1, 2) or jnp.size(X) == 0:
        raise ValueError(f"{where}: the inputs must have shape (N,) or (N, D), got {jnp.shape(X)}.")
    check_finite(where, "the inputs are", X)
    if not isinstance(kernels, list | tuple):
        if size is None:
            raise ValueError(
                f"{where}: one kernel for all functions needs an enclosing plate that tells their "
                "number. Give a list of kernels, or write it inside `numpyro.plate('latent', M)`."
            )
        kernels = [kernels] * size
    if not kernels:
        raise ValueError(f"{where}: there must be at least one latent function, got no kernels.")
    if size is not None and len(kernels) != size:
        raise ValueError(
            f"{where}: {len(kernels)} kernels inside a plate of size {size}. Give a kernel for "
            "each, or a single one for all."
        )
    same = all(kernel is kernels[0] for kernel in kernels)
    distinct = kernels[:1] if same else kernels
    found = [_template(where, m, kernel, X) for m, kernel in enumerate(distinct)]
    templates = tuple(found * len(kernels) if same else found)
    if {template.kind for template in templates} == {"zero"} and mean is None:
        raise ValueError(f"{where}: functions that are all zero need a `mean`.")
    kinds = {(jax.tree.structure(t), *map(jnp.shape, t.parameters.values())) for t in templates}
    alike = same or len(kinds) == 1
    sites = tuple(
        tuple(f"{name}_{path}" if alike else f"{name}_{m}_{path}" for path in t.parameters)
        for m, t in enumerate(templates)
    )
    functions = Functions(name, templates, X, mean, sites, alike)
    _check_memory(where, functions)
    return functions


def check_finite(where: str, inputs_are: str, X: Any) -> None:
    """Raise unless all inputs are finite, or traced."""
    if not not_jax_tracer(X):
        return
    finite = np.isfinite(np.asarray(X, float)).reshape(jnp.shape(X)[0], -1).all(axis=1)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise ValueError(
            f"{where}: {inputs_are} not finite at {bad.size} points, the first at {bad[0]}. "
            "Remove these points; missing responses are allowed, missing inputs are not."
        )


def _check_memory(where: str, functions: Functions) -> None:
    kinds = {template.kind for template in functions.templates}
    if functions.is_uniform and kinds <= {"white", "zero", "quasisep"}:
        return
    M, N = len(functions.templates), functions.num_inputs
    needed = M * N**2 * jnp.finfo(jnp.result_type(float)).bits // 8
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"{where}: {M} covariance matrices of {N} inputs take {needed:,} bytes, and the "
            f"machine has {available:,}. Use kernels of tinygp.kernels.quasisep, all of one kind, "
            "on inputs of one dimension, or fewer inputs."
        )


def _template(where: str, m: int, kernel: Any, X: Any) -> Template:
    N = jnp.shape(X)[0]
    if isinstance(kernel, str):
        if kernel not in ("white", "zero"):
            raise ValueError(
                f"{where}: kernel {m} is {kernel!r}; the names are 'white' and 'zero'."
            )
        return Template.of(kernel, X)
    if isinstance(kernel, Kernel):
        if not all(map(not_jax_tracer, jax.tree.leaves(kernel))):
            raise ValueError(
                f"{where}: kernel {m} is made inside the model. Make kernels outside of it; their "
                "parameters become latent sites."
            )
        template = Template.of(kernel, X)
        try:
            values = list(template.parameters.values())
            shape = jax.eval_shape(lambda: template.cross(values, X, X)).shape
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"{where}: kernel {m}, {type(kernel).__name__}, does not take inputs of shape "
                f"{jnp.shape(X)}: {error}"
            ) from error
        if shape != (N, N):
            raise ValueError(
                f"{where}: kernel {m}, {type(kernel).__name__}, makes a matrix of shape {shape} of "
                f"inputs of shape {jnp.shape(X)}, expected {(N, N)}. Does it take inputs of this "
                "dimension?"
            )
        return template
    if jnp.shape(kernel) != (N, N):
        raise ValueError(
            f"{where}: kernel {m} must be a tinygp kernel, 'white', 'zero' or a matrix of shape "
            f"{(N, N)}, got {type(kernel).__name__} of shape {jnp.shape(kernel)}."
        )
    if not_jax_tracer(kernel):
        K = np.asarray(kernel, float)
        size = np.max(np.abs(K))
        if not np.isfinite(size) or np.max(np.abs(K - K.T)) > 1e-5 * size:
            raise ValueError(f"{where}: matrix {m} is not finite and symmetric.")
        lowest = np.linalg.eigvalsh(K)[0]
        if lowest < -1e-5 * size:
            raise ValueError(
                f"{where}: matrix {m} is not positive semidefinite, its smallest eigenvalue is "
                f"{lowest:.3g}."
            )
    return Template.of(kernel, X)


def _plates() -> list[Any]:
    return [frame for frame in _PYRO_STACK if isinstance(frame, numpyro.plate)]


def _plate_shape() -> tuple[int, ...]:
    """Batch shape of the enclosing plates, with 1 at dimensions between them."""
    sizes = {plate.dim: plate.subsample_size for plate in _plates()}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


def _pair_shape(name: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Shape of the weights: that of the arguments and the enclosing plates together.

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
    """The shape of all weights, of which the plates may take a subsample."""
    full = list(shape)
    for plate in _plates():
        full[plate.dim] = plate.size
    return tuple(full)


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
