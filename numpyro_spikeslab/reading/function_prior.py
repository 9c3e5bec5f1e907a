# SPDX-License-Identifier: Apache-2.0
"""The prior of latent functions, with the parameters of their kernels as an array."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab.algebra.covariance import Covariance
from numpyro_spikeslab.algebra.kernels import Template
from numpyro_spikeslab.models.functions import Functions, Parameters
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.support.messages import bad

Kernel = Callable[[Float[Array, " P"]], Covariance]
Kernels = tuple[tuple[Kernel, ...], Int[Array, " M"]]
"""The distinct kernels of functions, which are compiled once each, and which one each has."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FunctionPrior:
    """Prior of M latent functions; theta are the logs of their kernels' parameters.

    - **is_white** - whether the functions have no order and no mean.
    """

    kernel: Kernels
    mean: Float[Array, "M N"]
    parameters: Parameters = field(metadata={"static": True})
    is_white: bool = field(metadata={"static": True})
    priors: dict[str, Any]

    def covariance(self, m: Any, theta: Float[Array, " P"]) -> Any:
        """Prior covariance of function ``m``."""
        distinct, which = self.kernel
        if len(distinct) == 1:
            return distinct[0](theta)
        return jax.lax.switch(which[m], distinct, theta)

    def variances(self, theta: Float[Array, "M P"]) -> Float[Array, "M N"]:
        """Prior variances of all functions."""
        numbers = jnp.arange(theta.shape[0])
        return jax.lax.map(lambda m: self.covariance(m, theta[m]).diagonal(), numbers)

    def log_density(self, m: Any, theta: Float[Array, " P"]) -> Float[Array, ""]:
        """Log density of the latent parameters ``exp(theta)`` of the kernel of function ``m``."""
        rows = self.parameters.rows
        M = len(rows)
        values = self.parameters.scatter(jnp.broadcast_to(theta, (M, *theta.shape)))
        total = jnp.zeros(M)
        for name in self.parameters.latent:
            prior = self.priors[name]
            # outside of their support some distributions have a density all the same
            inside = prior.support(values[name])
            log_prob = jnp.where(inside, prior.log_prob(values[name]), -jnp.inf)
            members = [m for m, row in enumerate(rows) if any(x.site == name for x in row)]
            total = total.at[np.array(members)].add(log_prob)
        return total[m]

    def draw(self, key: Array, theta: Float[Array, "M P"]) -> Float[Array, "M P"]:
        """Theta with its latent entries drawn from their prior."""
        values = self.parameters.scatter(theta)
        keys = jax.random.split(key, max(len(self.parameters.latent), 1))
        for one, name in zip(keys, self.parameters.latent, strict=False):
            values[name] = self.priors[name].sample(one).reshape(values[name].shape)
        return self.parameters.gather(values)


def kernel_of(functions: Functions) -> Kernels:
    """Make the kernels of latent functions, one program for each kind."""
    X = jnp.asarray(functions.X, float)
    function = _covariance if functions.is_uniform else _covariance_dense
    templates: list[Template] = []
    which = []
    for template in functions.templates:
        same = (k for k, other in enumerate(templates) if _differ_in_parameters(template, other))
        which.append(next(same, len(templates)))
        if which[-1] == len(templates):
            templates.append(template)
    return tuple(Partial(function, template, X) for template in templates), jnp.array(which)


def _covariance(template: Any, X: Any, theta: Any, dense: bool = False) -> Any:
    covariance = template.prior(template.split(theta), X, dense)
    # else XLA evaluates the kernel again in each product with the matrix
    return jax.lax.optimization_barrier(covariance)


def _covariance_dense(template: Any, X: Any, theta: Any) -> Any:
    return _covariance(template, X, theta, dense=True)


def _differ_in_parameters(one: Template, other: Template) -> bool:
    """Whether two kernels are the same but for the values of their parameters."""
    if str(jax.tree.structure(one)) != str(jax.tree.structure(other)):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), one.free, strict=True)
    return all(
        a is b or (np.shape(a) == np.shape(b) and (free or np.array_equal(a, b)))
        for a, b, free in leaves
    )


class KnownFunctions(NamedTuple):
    """The definition of the latent functions that weights mix.

    - **fixed** - values of kernel parameters that the model conditions on.
    - **is_plain** - whether their prior is Gaussian, neither masked nor scaled.
    - **parents** - other sites than the kernels' parameters on which it depends.
    - **children** - what depends on the functions beside the likelihood.
    - **cut_off** - sites of kernel parameters that a handler has hidden or set.
    """

    functions: Functions
    kernel: Kernels
    mean: Any
    fixed: dict[str, Any]
    is_plain: bool
    parents: tuple[str, ...]
    children: tuple[str, ...]
    cut_off: tuple[str, ...]

    def check(self, user: str) -> None:
        """Raise unless there is no more of the functions than a likelihood and their own prior."""
        what = f"{user}: the latent functions {self.functions.name!r}"
        if not self.is_plain:
            expected = "a Gaussian prior, neither masked nor scaled"
            raise bad(what, "another prior", expected, "Leave it to latent_functions.")
        self.check_prior(user)
        if self.children:
            remedy = "Fit with numpyro.infer.SVI, or sample the functions with NUTS."
            got = f"{list(self.children)}, which depend on them"
            raise bad(what, got, "the likelihood alone", remedy)

    def check_prior(self, user: str) -> None:
        """Raise if the prior depends on other sites, or not on the parameters of its own."""
        self.check_parameters(user)
        if self.parents:
            what = f"{user}: the prior of the latent functions {self.functions.name!r}"
            expected = "one that depends on the kernel parameters of `latent_functions` alone"
            raise bad(what, f"one that depends on {list(self.parents)}", expected)

    def check_parameters(self, user: str) -> None:
        """Raise if the kernels do not have the parameters of their sites."""
        if self.cut_off:
            what = f"{user}: the kernel parameters {list(self.cut_off)} of {self.functions.name!r}"
            got, remedy = "sites that are hidden or set", "Hold them with `handlers.condition`."
            raise bad(what, got, "latent sites", remedy)

    @property
    def parameters(self) -> Parameters:
        """The parameters of their kernels."""
        return self.functions.parameters

    @property
    def is_white(self) -> bool:
        """Whether the functions have no order and no mean."""
        white = self.functions.kinds == {"white"}
        if not white or self.functions.mean is None:
            return white
        return are_concrete(self.mean) and not np.any(np.asarray(self.mean))

    def prior(self, priors: dict[str, Any]) -> FunctionPrior:
        """Their prior, with the distributions of a view."""
        return FunctionPrior(self.kernel, self.mean, self.parameters, self.is_white, priors)

    def theta(self, values: dict[str, Any]) -> Any:
        """Logs of the kernels' parameters."""
        sites = {name: (values | self.fixed)[name] for name in self.parameters.sites}
        return _gather(self.parameters, sites)


_gather = jax.jit(Parameters.gather, static_argnums=0)
