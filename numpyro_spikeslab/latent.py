# SPDX-License-Identifier: Apache-2.0
"""What defines the prior of latent functions, and the checks of what an author gives."""

from collections.abc import Callable
from dataclasses import dataclass
import datetime
from functools import partial
import os
from typing import Any

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
from numpyro_spikeslab.precision import full_precision


# NumPyro makes `infer` a part of a pytree's structure, which JAX compares; arrays have no truth
@dataclass(frozen=True, eq=False)
class Functions:
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

    @property
    def num_inputs(self) -> int:
        return np.shape(self.X)[0]

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
        shape = (len(self.templates), np.shape(X)[0])
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

    @property
    def is_uniform(self) -> bool:
        """Whether the covariances of all functions have the same representation."""
        kinds = {template.kind for template in self.templates}
        if kinds == {"quasisep"}:
            return self.alike
        return len(kinds) == 1 or kinds == {"kernel", "matrix"}

    def covariances(self, sites: dict[str, Any]) -> Any:
        """Prior covariances of all functions at the inputs, with their jitter, stacked."""
        return self._each(lambda one, values: one.prior(values, self.X, not self.is_uniform), sites)

    def _each(self, of: Callable[..., Any], sites: dict[str, Any], *args: Any) -> Any:
        """``of(template, values, ...)`` of each function, stacked."""
        first, number = self.templates[0], len(self.templates)
        if all(template is first for template in self.templates):
            # one program serves all
            values = [sites[name] for name in self.sites[0]]
            return jax.vmap(partial(of, first), axis_size=number)(values, *args)
        every = [
            of(template, self.values(sites, m), *(x[m] for x in args))
            for m, template in enumerate(self.templates)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *every)

    @full_precision
    def conditional(self, sites: dict[str, Any], phi: Any, X_new: Any) -> dist.Distribution:
        """The functions at new inputs given their values at the inputs.

        :param sites: values of the sites of the kernels' parameters.
        :param phi: the values, shape (M, N).
        :param X_new: S new inputs, shape (S,) or (S, D).
        :return: a distribution with batch shape (M,) and event shape (S,). Independent of ``phi``
            for ``"white"`` functions; those that are ``"zero"`` are at their mean.
        :raises ValueError: if a prior covariance or mean is known at the old inputs only, or the
            new inputs have another width.
        """
        check_finite(f"latent_functions({self.name!r})", "the new inputs are", X_new)
        if np.shape(X_new)[1:] != np.shape(self.X)[1:]:
            raise ValueError(
                f"latent_functions({self.name!r}): the new inputs have shape {np.shape(X_new)} "
                f"and the inputs have shape {np.shape(self.X)}; they must have the same width."
            )
        deviation, mean_new = phi - self.mean_at(self.X), self.mean_at(X_new)
        moved, roots = self._each(
            lambda one, values, own: one.extend(values, self.X, X_new, own), sites, deviation
        )
        return dist.MultivariateNormal(mean_new + moved, scale_tril=roots)


def define(name: str, kernels: Any, X: Any, mean: Any, size: int | None) -> Functions:
    """Check the arguments of :func:`~numpyro_spikeslab.latent_functions` and put them together.

    :param size: number of functions that the enclosing plate tells, if there is one.
    :raises ValueError: if an argument is wrong or does not fit the others.
    """
    where = f"latent_functions({name!r})"
    if np.ndim(X) not in (1, 2) or np.size(X) == 0:
        raise ValueError(f"{where}: the inputs must have shape (N,) or (N, D), got {np.shape(X)}.")
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
    if any(template.kind in ("kernel", "quasisep") for template in templates):
        _check_precision(where, X)
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
    """Raise unless all inputs are finite real numbers, or traced.

    :param where: who asks, for the error message.
    :param inputs_are: the beginning of what it says, such as ``"the inputs are"``.
    :raises ValueError: if they are dates, complex or other than numbers, or not finite.
    """
    if not not_jax_tracer(X):
        return
    if np.ma.is_masked(X):
        raise ValueError(
            f"{where}: {inputs_are} masked at {np.ma.count_masked(X)} places. Remove these points; "
            "missing responses are allowed, missing inputs are not."
        )
    values = np.asarray(X)
    if are_dates(values):
        raise ValueError(
            f"{where}: {inputs_are} dates or times. Convert them to numbers in the unit of the "
            "kernels' scales, years for example: "
            "`(dates - dates[0]) / np.timedelta64(1, 'D') / 365.25`."
        )
    try:
        if values.dtype.kind in "cSU":
            raise TypeError(f"no real numbers: {values.dtype}")
        values = values.astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {inputs_are} of type {values.dtype}. They must be real numbers."
        ) from error
    finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise ValueError(
            f"{where}: {inputs_are} not finite at {bad.size} points, the first at {bad[0]}. "
            "Remove these points; missing responses are allowed, missing inputs are not."
        )


def _check_precision(where: str, X: Any) -> None:
    """Refuse inputs of which many are the same in single precision."""
    if not not_jax_tracer(X) or jnp.result_type(float) == np.float64:
        return
    values = np.asarray(X, float)
    for column in values.reshape(len(values), -1).T:
        different = np.unique(column)
        # what differs by rounding alone was meant to be equal
        steps = np.diff(different) > 1e-9 * np.ptp(column)
        lost = steps & (np.diff(different.astype(jnp.result_type(float))) == 0)
        if np.sum(lost) > 0.1 * np.sum(steps):
            raise ValueError(
                f"{where}: in single precision {np.sum(lost)} of {np.sum(steps) + 1} different "
                "inputs are the same as the one before. Count them from the first, `X - X[0]`, or "
                "call numpyro.enable_x64()."
            )


def are_dates(values: np.ndarray) -> bool:
    """Whether there are dates or times, among other objects too."""
    # those of pandas are among them
    kinds = (datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)
    return values.dtype.kind in "mM" or (
        values.dtype.kind == "O" and any(isinstance(x, kinds) for x in values.flat)
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
    N = np.shape(X)[0]
    if isinstance(kernel, str):
        if kernel not in ("white", "zero"):
            raise ValueError(
                f"{where}: kernel {m} is {kernel!r}; the names are 'white' and 'zero'."
            )
        return Template.of(kernel, X)
    if is_kernel(kernel):
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
                f"{np.shape(X)}: {error}"
            ) from error
        if shape != (N, N):
            raise ValueError(
                f"{where}: kernel {m}, {type(kernel).__name__}, makes a matrix of shape {shape} of "
                f"inputs of shape {np.shape(X)}, expected {(N, N)}. Does it take inputs of this "
                "dimension?"
            )
        _check_distances(where, m, kernel, X)
        return template
    if np.shape(kernel) != (N, N):
        raise ValueError(
            f"{where}: kernel {m} must be a tinygp kernel, 'white', 'zero' or a matrix of shape "
            f"{(N, N)}, got {type(kernel).__name__} of shape {np.shape(kernel)}."
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


def _check_distances(where: str, m: int, kernel: Any, X: Any) -> None:
    """Refuse kernels that are covariances of inputs in one dimension only."""
    for part in no_covariances(kernel, np.zeros(np.shape(X)[1:])):
        if not_jax_tracer(X) and np.linalg.matrix_rank(X - np.mean(X, axis=0)) < 2:
            # along a line these are what they are in one dimension
            return
        name, distance = type(part).__name__, type(part.distance).__name__
        remedy = "Give it `distance=tinygp.kernels.distance.L2Distance()`"
        if name in ONE_DIMENSION_ONLY:
            remedy = "Multiply kernels of one column each, `tinygp.transforms.Subspace(0, kernel)`"
        raise ValueError(
            f"{where}: kernel {m}: {name} by {distance} is no covariance of inputs in several "
            f"dimensions, for matrices of it may have negative eigenvalues. {remedy}."
        )
