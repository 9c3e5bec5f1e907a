# SPDX-License-Identifier: Apache-2.0
"""The prior of latent functions, with the parameters of their kernels as an array."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab.algebra.covariance import Covariance
from numpyro_spikeslab.algebra.kernels import Template
from numpyro_spikeslab.algebra.log_gamma import with_short_gammas
from numpyro_spikeslab.latent import Functions, Parameters
from numpyro_spikeslab.reading.program import are_concrete

Kernel = Callable[[Float[Array, " P"]], Covariance]


class Mixed(NamedTuple):
    """Several kernels and which of them each function has; compiled once for each kernel.

    - **kernels** - the distinct kernels.
    - **which** - positions in ``kernels``, shape (M,).
    """

    kernels: tuple[Kernel, ...]
    which: Int[Array, " M"]


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
        M = len(self.parameters.rows)
        values = self.parameters.scatter(jnp.broadcast_to(theta, (M, *theta.shape)))
        total = jnp.zeros(M)
        for name in self.parameters.latent:
            prior = self.priors[name]
            # outside of their support some distributions have a density all the same
            inside = prior.support(values[name])
            log_prob = jnp.where(inside, with_short_gammas(prior.log_prob)(values[name]), -jnp.inf)
            total = total.at[np.array(self.parameters.members(name))].add(log_prob)
        return total[m]

    def draw(self, key: Array, theta: Float[Array, "M P"]) -> Float[Array, "M P"]:
        """Theta with its latent entries drawn from their prior."""
        values = self.parameters.scatter(theta)
        keys = jax.random.split(key, max(len(self.parameters.latent), 1))
        for one, name in zip(keys, self.parameters.latent, strict=False):
            values[name] = self.priors[name].sample(one).reshape(values[name].shape)
        return self.parameters.gather(values)


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
    - **kernel** - their kernels.
    - **mean** - their prior means, (M, N).
    - **fixed** - values of kernel parameters that the model conditions on.
    - **is_plain** - whether their prior is Gaussian, neither masked nor scaled.
    - **parents** - other sites than the kernels' parameters on which it depends.
    - **children** - what depends on the functions beside the likelihood.
    - **cut_off** - sites of kernel parameters that a handler has hidden or set.
    """

    functions: Functions
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
    def parameters(self) -> Parameters:
        """The parameters of their kernels."""
        return self.functions.parameters

    @property
    def is_white(self) -> bool:
        """Whether the functions have no order and no mean."""
        if self.functions.kinds != {"white"}:
            return False
        if self.functions.mean is None:
            return True
        return are_concrete(self.mean) and not np.any(np.asarray(self.mean))

    def prior(self, priors: dict[str, Any]) -> FunctionPrior:
        """Their prior, with the distributions of a view."""
        return FunctionPrior(self.kernel, self.mean, self.parameters, priors)

    def theta(self, values: dict[str, Any]) -> Any:
        """Logs of the kernels' parameters."""
        known = {name: (values | self.fixed)[name] for name in self.parameters.sites}
        return _gather(self.parameters, known)


_gather = jax.jit(Parameters.gather, static_argnums=0)
