# SPDX-License-Identifier: Apache-2.0
"""The prior of latent functions, with the parameters of their kernels as an array."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab.algebra.covariance import Covariance
from numpyro_spikeslab.algebra.kernels import Template
from numpyro_spikeslab.algebra.log_gamma import with_short_gammas
from numpyro_spikeslab.primitives import Functions
from numpyro_spikeslab.reading.program import are_concrete

Kernel = Callable[[Float[Array, " P"]], Covariance]


class Mixed(NamedTuple):
    """Several kernels and which of them each function has; compiled once for each kernel.

    - **kernels** - the distinct kernels.
    - **which** - positions in ``kernels``, shape (M,).
    """

    kernels: tuple[Kernel, ...]
    which: Int[Array, " M"]


@dataclass(frozen=True)
class Parameters:
    """Which entries of which sites the parameters of each kernel are; hashable.

    - **sites** - for each function the names of its parameters' sites.
    - **shapes** - for each function the shapes of its parameters.
    - **alike** - whether a site has one entry for each function, not one function its own sites.
    - **latent** - names of the sites that are latent.
    """

    sites: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    alike: bool
    latent: tuple[str, ...]

    @classmethod
    def of(cls, functions: Functions, latent: tuple[str, ...]) -> "Parameters":
        shapes = tuple(
            tuple(jnp.shape(x) for x in template.parameters.values())
            for template in functions.templates
        )
        return cls(functions.sites, shapes, functions.alike, latent)

    def gather(self, values: dict[str, Any]) -> Float[Array, "M P"]:
        """Logs of the parameters of each kernel, padded with zeros where there are fewer."""
        return self._rows({name: jnp.log(values[name]) for name in self.names})

    def scatter(self, theta: Float[Array, "M P"]) -> dict[str, Any]:
        """The inverse of :meth:`gather`."""
        found: dict[str, list[Any]] = {}
        for m, names in enumerate(self.sites):
            sizes = [int(np.prod(shape)) for shape in self.shapes[m]]
            parts = jnp.split(jnp.exp(theta[m]), np.cumsum(sizes))[: len(names)]
            for name, part, shape in zip(names, parts, self.shapes[m], strict=True):
                found.setdefault(name, []).append(part.reshape(shape))
        return {k: jnp.stack(x) if self.alike else x[0] for k, x in found.items()}

    @property
    def is_free(self) -> Bool[np.ndarray, "M P"]:
        """Which entries of :meth:`gather` are latent."""
        shapes = {
            name: ((len(self.sites),) if self.alike else ()) + shape
            for names, every in zip(self.sites, self.shapes, strict=True)
            for name, shape in zip(names, every, strict=True)
        }
        marks = {k: np.full(shape, float(k in self.latent)) for k, shape in shapes.items()}
        return np.asarray(self._rows(marks, np)) > 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sites."""
        return tuple(dict.fromkeys(name for names in self.sites for name in names))

    def _rows(self, values: dict[str, Any], xp: Any = jnp) -> Any:
        rows = []
        for m, names in enumerate(self.sites):
            parts = [xp.ravel(values[name][m] if self.alike else values[name]) for name in names]
            rows.append(xp.concatenate([xp.zeros(0), *parts]))
        size = max(row.size for row in rows)
        return xp.stack([xp.pad(row, (0, size - row.size)) for row in rows])


class FunctionPrior(NamedTuple):
    """Prior of M latent functions; theta are the logs of their kernels' parameters.

    - **kernel** - one kernel of all functions, or several.
    - **mean** - prior means, (M, N).
    - **parameters** - what the entries of theta are.
    - **priors** - distributions of the sites of the kernels' parameters.
    """

    kernel: Kernel | Mixed
    mean: Float[Array, "M N"]
    parameters: Parameters
    priors: dict[str, Any]

    def covariance(self, m: Any, theta: Float[Array, " P"]) -> Any:
        """Prior covariance of function ``m``."""
        if isinstance(self.kernel, Mixed):
            return jax.lax.switch(self.kernel.which[m], self.kernel.kernels, theta)
        return self.kernel(theta)

    def variances(self, theta: Float[Array, "M P"]) -> Float[Array, "M N"]:
        """Prior variances of all functions."""
        numbers = jnp.arange(theta.shape[0])
        return jax.lax.map(lambda m: self.covariance(m, theta[m]).diagonal(), numbers)

    def log_density(self, m: Any, theta: Float[Array, " P"]) -> Float[Array, ""]:
        """Log density of the latent parameters ``exp(theta)`` of the kernel of function ``m``."""
        M = len(self.parameters.sites)
        values = self.parameters.scatter(jnp.broadcast_to(theta, (M, *theta.shape)))
        total = jnp.zeros(M)
        for name in self.parameters.latent:
            prior = self.priors[name]
            # outside of their support some distributions have a density all the same
            inside = prior.support(values[name])
            log_prob = jnp.where(inside, with_short_gammas(prior.log_prob)(values[name]), -jnp.inf)
            if self.parameters.alike:
                total += log_prob
            else:
                total = total.at[self._owner(name)].add(log_prob)
        return total[m]

    def draw(self, key: Array, theta: Float[Array, "M P"]) -> Float[Array, "M P"]:
        """Theta with its latent entries drawn from their prior."""
        values = self.parameters.scatter(theta)
        keys = jax.random.split(key, max(len(self.parameters.latent), 1))
        for one, name in zip(keys, self.parameters.latent, strict=False):
            values[name] = self.priors[name].sample(one).reshape(values[name].shape)
        return self.parameters.gather(values)

    def _owner(self, name: str) -> int:
        return next(m for m, names in enumerate(self.parameters.sites) if name in names)


def kernel_of(functions: Functions) -> Kernel | Mixed:
    """The kernels of functions, the distinct ones compiled once each."""
    X = jnp.asarray(functions.X, float)
    function = _covariance if functions.is_uniform else _covariance_dense
    kernels: list[Template] = []
    which = []
    for template in functions.templates:
        same = (k for k, other in enumerate(kernels) if _differ_in_parameters(template, other))
        which.append(next(same, len(kernels)))
        if which[-1] == len(kernels):
            kernels.append(template)
    every = tuple(Partial(function, template, X) for template in kernels)
    return every[0] if len(every) == 1 else Mixed(every, jnp.array(which))


def _covariance(template: Any, X: Any, theta: Any, dense: bool = False) -> Any:
    covariance = template.prior(template.split(theta), X, dense)
    # else XLA evaluates the kernel again in each product with the matrix
    return jax.lax.optimization_barrier(covariance)


def _covariance_dense(template: Any, X: Any, theta: Any) -> Any:
    return _covariance(template, X, theta, dense=True)


def _differ_in_parameters(one: Template, other: Template) -> bool:
    """Whether two kernels are the same but for the values of their parameters."""
    if one is other:
        return True
    if str(jax.tree.structure(one)) != str(jax.tree.structure(other)):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), one.free, strict=True)
    return all(
        a is b or (np.shape(a) == np.shape(b) and (free or np.array_equal(a, b)))
        for a, b, free in leaves
    )


class KnownFunctions(NamedTuple):
    """What is known of the latent functions that weights mix.

    - **functions** - what defines them, for predictions at new inputs.
    - **parameters** - which entries of which sites the parameters of their kernels are.
    - **kernel** - their kernels.
    - **mean** - their prior means, (M, N).
    - **fixed** - values of kernel parameters that the model conditions on.
    - **is_plain** - whether their prior is Gaussian, neither masked nor scaled.
    - **parents** - other sites than the kernels' parameters on which it depends.
    - **children** - what depends on the functions beside the likelihood.
    - **cut_off** - sites of kernel parameters that a handler has hidden or set.
    """

    functions: Functions
    parameters: Parameters
    kernel: Kernel | Mixed
    mean: Any
    fixed: dict[str, Any]
    is_plain: bool
    parents: tuple[str, ...]
    children: tuple[str, ...]
    cut_off: tuple[str, ...]

    def check(self, user: str) -> None:
        """Raise unless there is no more of the functions than a likelihood and their own prior."""
        name = self.functions.name
        if not self.is_plain:
            raise ValueError(
                f"{user}: the prior of the latent functions {name!r} must be Gaussian, neither "
                "masked nor scaled. Leave it to latent_functions."
            )
        self.check_prior(user)
        if self.children:
            raise ValueError(
                f"{user}: besides the likelihood, {list(self.children)} depend on the latent "
                f"functions {name!r}, which would be found as if they did not. Fit with "
                "numpyro.infer.SVI, or sample the functions with NUTS."
            )

    def check_parameters(self, user: str) -> None:
        """Raise if the kernels do not have the parameters of their sites."""
        if self.cut_off:
            raise ValueError(
                f"{user}: the kernel parameters {list(self.cut_off)} of {self.functions.name!r} "
                "are hidden or set, as by `handlers.block` or `handlers.do`. Leave them latent, or "
                "hold them with `handlers.condition`."
            )

    def check_prior(self, user: str) -> None:
        """Raise if the prior depends on other sites, or not on the parameters of its own."""
        self.check_parameters(user)
        if self.parents:
            raise ValueError(
                f"{user}: the prior of the latent functions {self.functions.name!r} depends on "
                f"{list(self.parents)}. Only the kernel parameters that `latent_functions` makes "
                "itself are supported."
            )

    @property
    def is_white(self) -> bool:
        """Whether the functions have no order and no mean."""
        if {template.kind for template in self.functions.templates} != {"white"}:
            return False
        if self.functions.mean is None:
            return True
        return are_concrete(self.mean) and not np.any(np.asarray(self.mean))

    def prior(self, priors: dict[str, Any]) -> FunctionPrior:
        """Their prior, with the distributions of a view."""
        return FunctionPrior(self.kernel, self.mean, self.parameters, priors)

    def theta(self, values: dict[str, Any]) -> Any:
        """Logs of the kernels' parameters."""
        known = {name: (values | self.fixed)[name] for name in self.parameters.names}
        return _gather(self.parameters, known)


_gather = jax.jit(Parameters.gather, static_argnums=0)
