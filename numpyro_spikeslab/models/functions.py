# SPDX-License-Identifier: Apache-2.0
"""The definition of latent functions, and checks of what an author gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float
import numpy as np

import jax
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.algebra.kernels import (
    ONE_DIMENSION_ONLY,
    Template,
    is_kernel,
    no_covariances,
)
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision
from numpyro_spikeslab.support.tabular import as_numbers, is_array


class Parameter(NamedTuple):
    """A parameter of one kernel, of this shape: an entry of a site, or a site (`None`)."""

    site: str
    entry: int | None
    shape: tuple[int, ...]

    def of(self, sites: dict[str, Any]) -> Any:
        return sites[self.site] if self.entry is None else sites[self.site][self.entry]


@dataclass(frozen=True)
class Parameters:
    """The parameters of the kernel of each function, and the names of latent sites; hashable."""

    rows: tuple[tuple[Parameter, ...], ...]
    latent: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str, templates: tuple[Template, ...]) -> "Parameters":
        """Name the sites, for each parameter or, if kernels differ, each function and parameter."""
        kinds = {(jax.tree.structure(t), *map(jnp.shape, t.parameters.values())) for t in templates}
        shared = all(t is templates[0] for t in templates) or len(kinds) == 1

        def parameter(m, path, x):
            site, entry = (f"{name}_{path}", m) if shared else (f"{name}_{m}_{path}", None)
            return Parameter(site, entry, jnp.shape(x))

        return cls(
            tuple(
                tuple(parameter(m, path, x) for path, x in template.parameters.items())
                for m, template in enumerate(templates)
            )
        )

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all sites."""
        return tuple(dict.fromkeys(parameter.site for row in self.rows for parameter in row))

    def prefixed(self, prefix: str) -> "Parameters":
        """Parameters whose sites have a prefix, as in a scope."""
        rows = tuple(tuple(x._replace(site=prefix + x.site) for x in row) for row in self.rows)
        return replace(self, rows=rows)

    @property
    def are_shared(self) -> bool:
        """Whether each site has an entry for each function."""
        return all(parameter.entry is not None for row in self.rows for parameter in row)

    def gather(self, sites: dict[str, Any]) -> Float[Array, "M P"]:
        """Logs of the parameters of each kernel, padded with zeros."""
        logs = {name: jnp.log(sites[name]) for name in self.sites}
        return self._table(lambda parameter: parameter.of(logs), jnp)

    def scatter(self, theta: Float[Array, "M P"]) -> dict[str, Any]:
        """Invert :meth:`gather`."""
        entries: dict[str, list[Any]] = {name: [] for name in self.sites}
        for row, values in zip(self.rows, jnp.exp(theta), strict=True):
            ends = np.cumsum([int(np.prod(parameter.shape)) for parameter in row])
            for parameter, part in zip(row, jnp.split(values, ends), strict=False):
                entries[parameter.site].append(part.reshape(parameter.shape))
        return {k: jnp.stack(x) if self.are_shared else x[0] for k, x in entries.items()}

    @property
    def is_free(self) -> Bool[np.ndarray, "M P"]:
        """Which entries of :meth:`gather` are latent."""
        return self._table(lambda x: np.full(x.shape, x.site in self.latent, float), np) > 0

    def _table(self, of: Callable[[Parameter], Any], xp: Any) -> Any:
        rows = [xp.concatenate([xp.zeros(0), *(xp.ravel(of(x)) for x in row)]) for row in self.rows]
        size = max(row.size for row in rows)
        return xp.stack([xp.pad(row, (0, size - row.size)) for row in rows])


# NumPyro makes `infer` a part of a pytree's structure, which JAX compares; arrays have no truth
@dataclass(frozen=True, eq=False)
class Functions:
    """The definition of the prior of M latent functions: the name of their site, their M kernels,
    the N inputs, the prior mean (`None`, an array or a function of the inputs), and parameters."""

    name: str
    templates: tuple[Template, ...]
    X: Any
    mean: Any
    parameters: Parameters

    @property
    def num_inputs(self) -> int:
        return np.shape(self.X)[0]

    @property
    def kinds(self) -> set[str]:
        """Kinds of the kernels; see :class:`~numpyro_spikeslab.algebra.kernels.Template`."""
        return {template.kind for template in self.templates}

    def values(self, sites: dict[str, Any], m: int) -> list[Any]:
        """Values of the parameters of one kernel, from the values of the sites."""
        return [parameter.of(sites) for parameter in self.parameters.rows[m]]

    def mean_at(self, X: Any) -> Float[Array, "M S"]:
        """Prior means at inputs, which must be the old ones if the mean is an array."""
        what, shape = f"{user_of(self.name)}: mean", (len(self.templates), np.shape(X)[0])
        if self.mean is None:
            return jnp.zeros(shape)
        if not callable(self.mean) and X is not self.X:
            raise bad(what, "an array, at new inputs", "a function of the inputs")
        mean = jnp.asarray(self.mean(X) if callable(self.mean) else self.mean, float)
        if mean.shape not in (shape, shape[1:], ()):
            raise bad(what, f"shape {mean.shape}", f"{shape} or {shape[1:]}")
        return jnp.broadcast_to(mean, shape)

    @property
    def is_uniform(self) -> bool:
        """Whether the covariances of all functions have the same representation."""
        if self.kinds == {"quasisep"}:
            return self.parameters.are_shared
        return len(self.kinds) == 1 or self.kinds == {"kernel", "matrix"}

    def covariances(self, sites: dict[str, Any]) -> Any:
        """Prior covariances of all functions at the inputs, with their jitter, stacked."""
        return self._each(lambda one, values: one.prior(values, self.X, not self.is_uniform), sites)

    def _each(self, of: Callable[..., Any], sites: dict[str, Any], *args: Any) -> Any:
        """``of(template, values, ...)`` of each function, stacked."""
        first, number = self.templates[0], len(self.templates)
        if all(template is first for template in self.templates):
            # one program for all functions
            values = [sites[parameter.site] for parameter in self.parameters.rows[0]]
            return jax.vmap(partial(of, first), axis_size=number)(values, *args)
        results = [
            of(template, self.values(sites, m), *(x[m] for x in args))
            for m, template in enumerate(self.templates)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    @full_precision
    def conditional(self, sites: dict[str, Any], phi: Any, X_new: Any) -> dist.Distribution:
        """The functions at new inputs given their values at the inputs.

        :param sites: values of the sites of the kernels' parameters.
        :param phi: the values, shape (M, N).
        :param X_new: S new inputs, shape (S,) or (S, D).
        :return: a distribution with batch shape (M,) and event shape (S,).
        :raises ValueError: if a covariance or mean is of the old inputs, or widths differ.
        """
        what = f"{user_of(self.name)}: new inputs"
        X_new = checked_inputs(what, X_new)
        if np.shape(X_new)[1:] != np.shape(self.X)[1:]:
            width = f"the same width as the inputs, of shape {np.shape(self.X)}"
            raise bad(what, f"shape {np.shape(X_new)}", width)
        deviation, mean_new = phi - self.mean_at(self.X), self.mean_at(X_new)
        moved, roots = self._each(
            lambda one, values, each: one.extend(values, self.X, X_new, each), sites, deviation
        )
        return dist.MultivariateNormal(mean_new + moved, scale_tril=roots)


def user_of(name: str) -> str:
    """The beginning of error messages about functions."""
    return f"latent_functions({name!r})"


def define(name: str, kernels: Any, X: Any, mean: Any, size: int | None) -> Functions:
    """Check the arguments of :func:`~numpyro_spikeslab.latent_functions`; join them."""
    user = user_of(name)
    if np.ndim(X) not in (1, 2) or np.size(X) == 0:
        raise bad(f"{user}: inputs", f"shape {np.shape(X)}", "(N,) or (N, D)")
    X = checked_inputs(f"{user}: inputs", X)
    if not isinstance(kernels, list | tuple):
        if size is None:
            remedy = "Give a list, or call it inside `numpyro.plate('latent', M)`."
            expected = "a list of kernels, or an enclosing plate that tells their number"
            raise bad(f"{user}: kernels", "one kernel and no plate", expected, remedy)
        kernels = [kernels] * size
    if not kernels or len(kernels) != (size or len(kernels)):
        expected = "at least one" if size is None else f"{size}, the size of the enclosing plate"
        raise bad(f"{user}: kernels", f"{len(kernels)} of them", expected)
    same = all(kernel is kernels[0] for kernel in kernels)
    distinct = kernels[:1] if same else kernels
    templates = tuple(_template(f"{user}: kernel {m}", k, X) for m, k in enumerate(distinct))
    templates *= len(kernels) // len(distinct)
    functions = Functions(name, templates, X, mean, Parameters.named(name, templates))
    if functions.kinds & {"kernel", "quasisep"}:
        _check_precision(f"{user}: inputs", X)
    if functions.kinds == {"zero"} and mean is None:
        raise bad(f"{user}: mean", "None for functions that are all zero", "a mean")
    return functions


def _template(what: str, kernel: Any, X: Any) -> Template:
    """Return the template of a kernel that is a covariance of the inputs."""
    N = np.shape(X)[0]
    if isinstance(kernel, str) and kernel not in ("white", "zero"):
        raise bad(what, repr(kernel), "'white' or 'zero', or a kernel")
    if not is_kernel(kernel):
        if not isinstance(kernel, str):
            _check_matrix(what, kernel, N)
        return Template.of(kernel, X)
    if not all(map(not_jax_tracer, jax.tree.leaves(kernel))):
        remedy = "Make kernels outside of the model; their parameters become latent sites."
        raise bad(what, "a kernel that is made inside the model", "numbers", remedy)
    template = Template.of(kernel, X)
    what = f"{what}, {type(kernel).__name__}, at inputs of shape {np.shape(X)}"
    values, expected = list(template.parameters.values()), "a kernel of inputs of this dimension"
    try:
        shape = jax.eval_shape(lambda: template.cross(values, X, X)).shape
    except (TypeError, ValueError, AssertionError) as error:
        raise bad(what, str(error), expected) from error
    if shape != (N, N):
        raise bad(what, f"a matrix of shape {shape}", f"{(N, N)}, {expected}")
    _check_distances(what, kernel, X)
    return template


def _check_matrix(what: str, matrix: Any, N: int) -> None:
    """Check that a matrix is a covariance of N values."""
    if np.shape(matrix) != (N, N):
        got = f"{type(matrix).__name__} of shape {np.shape(matrix)}"
        expected = f"a tinygp kernel, 'white', 'zero' or a covariance matrix of shape {(N, N)}"
        raise bad(what, got, expected)
    if not not_jax_tracer(matrix):
        return
    K = np.asarray(matrix, float)
    size = np.max(np.abs(K))
    is_symmetric = np.isfinite(size) and np.max(np.abs(K - K.T)) <= 1e-5 * size
    if not is_symmetric or np.linalg.eigvalsh(K)[0] < -1e-5 * size:
        raise bad(what, "another matrix", "a finite, symmetric, positive semidefinite matrix")


def _check_distances(what: str, kernel: Any, X: Any) -> None:
    """Refuse kernels that are covariances of inputs in one dimension only."""
    part = next(no_covariances(kernel), None)
    if part is None or np.size(X) == np.shape(X)[0]:
        return
    if not_jax_tracer(X) and np.linalg.matrix_rank(X - np.mean(X, axis=0)) < 2:
        # along a line they are the covariances that they are in one dimension
        return
    name = type(part).__name__
    remedy = "Give it `distance=tinygp.kernels.distance.L2Distance()`."
    if name in ONE_DIMENSION_ONLY:
        remedy = "Multiply kernels of one column each, `tinygp.transforms.Subspace(0, kernel)`."
    got = f"{name} by {type(part.distance).__name__}"
    raise bad(what, got, "a covariance of inputs in several dimensions", remedy)


def checked_inputs(what: str, X: Any) -> Any:
    """Return inputs as an array; raise unless they are finite real numbers, or traced."""
    if not not_jax_tracer(X):
        return X
    numbers = as_numbers(what, X)
    return X if is_array(X) else numbers


def _check_precision(what: str, X: Any) -> None:
    """Refuse inputs that single precision makes equal, if they are many."""
    if not not_jax_tracer(X) or jnp.result_type(float) == np.float64:
        return
    for column in np.reshape(np.asarray(X, float), (len(X), -1)).T:
        # inputs that differ by rounding alone were meant to be equal
        exact = len(np.unique(np.round((column - column[0]) / (np.ptp(column) or 1), 9)))
        single = len(np.unique(column.astype(np.float32)))
        if single < 0.9 * exact:
            got = f"{exact} different inputs, {single} in single precision"
            remedy = "Count them from the first, `X - X[0]`, or call numpyro.enable_x64()."
            raise bad(what, got, "different numbers", remedy)
