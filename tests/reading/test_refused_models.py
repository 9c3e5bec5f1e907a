# SPDX-License-Identifier: Apache-2.0
"""Models and data that are refused, with messages that name the site and the remedy."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
from truth.regressions import N, P, X, Y, located, normal, observe, read, regression, weigh

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.reparam import LocScaleReparam

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.primitives import MARK, weights

pytestmark = pytest.mark.usefixtures("x64")

PLAIN = regression()


def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    return svi.run(random.key(0), 3, *args, progress_bar=False, **kwargs)


def sample(model: Any, *args: Any, **kwargs: Any) -> Any:
    kernel = model if isinstance(model, Gibbs) else nss.PairedGibbs(model)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, **kwargs)


def call(guide: Callable) -> Callable:
    return lambda model, *args: handlers.seed(guide(model), 0)(*args)


def assert_says(use: Callable, model: Any, args: tuple, *parts: str, **kwargs: Any) -> None:
    """An early error whose message, notes included, has all the parts."""
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        use(model, *args, **kwargs)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in parts if part not in message] == [], message


def with_entry(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def normal_with(scale: Any = 0.5, mask: Any = True) -> Callable:
    return regression(lambda X, w: dist.Normal(X @ w, scale, validate_args=False).mask(mask))


def imputed(X, y):
    location = X @ weigh()
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(location, 0.5), obs=y, obs_mask=np.arange(N) != 3)


def by_hand(
    location: Callable = lambda X, w, s, v: X @ w,
    spike: Any = dist.Bernoulli(probs=0.25),  # noqa: B008
    slab: Callable = lambda b: dist.Normal(0.0, 1.0),
    observations: Callable = lambda y, w, b: y,
    around: Callable = lambda w: nullcontext(),
    mask: Callable = lambda w: True,
) -> Callable:
    """A regression whose pair somebody has written without `spike_slab`; b is another site."""

    def model(X, y):
        b = normal("b")
        with numpyro.plate("feature", P):
            s = numpyro.sample("w_spike", spike, infer={MARK: ("w", "spike")})
            v = numpyro.sample("w_slab", slab(b), infer={MARK: ("w", "slab")})
            w = numpyro.deterministic("w", weights(s, v))
        likelihood = dist.Normal(location(X, w, s, v), 0.5).mask(mask(w))
        with around(w), numpyro.plate("obs", N):
            numpyro.sample("y", likelihood, obs=observations(y, w, b))

    return model


# Data


def of_tasks(X, Y):
    with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", P, dim=-1):
        w = nss.spike_slab("w", 0.25)
    numpyro.sample("y", dist.Normal(X @ w.T, 0.5), obs=Y)


FEATURES = ("['w']", "'y'", "not finite, the first at 2, by columns [1]", "Remove NaN")
FRAME = pd.DataFrame(X)
TABLE = ("test: arguments of the model: got tables of pandas in [0]", "X.to_numpy()")
RESPONSE = ("observations of 'y'", "first at 3", "handlers.mask")
DATA: dict[str, tuple[Callable, tuple, tuple[str, ...]]] = {
    "design, NaN": (PLAIN, (with_entry(X, (2, 1), np.nan), Y), FEATURES),
    "design of tasks, NaN": (
        of_tasks,
        (with_entry(X, (2, 1), np.nan), np.stack([Y, Y], 1)),
        ("the design", "at 2 observations", "row 2, column 0"),
    ),
    "tasks, infinite": (
        of_tasks,
        (X, with_entry(np.stack([Y, Y], 1), (4, 1), np.inf)),
        ("observations of 'y' are not finite", "row 4, column 1"),
    ),
    "a DataFrame": (PLAIN, (FRAME, Y), TABLE),
    "a DataFrame in JAX": (located(lambda X, w: jnp.sin(X) @ w), (FRAME, Y), TABLE),
    "observations, infinite": (PLAIN, (X, with_entry(Y, 3, -np.inf)), RESPONSE),
    "offset": (
        located(lambda X, w: with_entry(np.zeros(N), 5, np.nan) + X @ w),
        (X, Y),
        ("location", "'y'", "first at 5", "Remove NaN"),
    ),
    "imputed by NumPyro": (imputed, (X, Y), ("'y_unobserved'", "handlers.mask`, not `obs_mask`")),
    "no observations": (PLAIN, (X, None), ("'y'", "observ", "obs=y")),
    "all masked, array": (normal_with(mask=np.zeros(N, bool)), (X, Y), ("no observ",)),
    "all masked, scalar": (normal_with(mask=False), (X, Y), ("observed sites []",)),
    "no rows": (PLAIN, (X[:0], Y[:0]), ("plate", "data")),
    **{
        f"shape {np.shape(y)}": (PLAIN, (X, y), ("'y'", str(np.shape(y)), "(8,)", "same shape"))
        for y in (Y[:, None], Y[None], Y[:5], Y[0])
    },
    "plate too large": (regression(extra=1), (X, Y), ("(3,)", "(4,)", "sizes of its plates")),
    "subsampled": (regression(subsample_size=4), (X, Y), ("['obs']", "subsample_size")),
    **{
        f"noise {scale}": (normal_with(scale), (X, Y), ("noise scale of 'y'", "positive"))
        for scale in (0.0, np.nan, np.inf)
    },
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_do_not_fit_are_refused(name):
    model, args, parts = DATA[name]
    assert_says(read, model, args, *parts)


# Models


def two_sites(X, y):
    w = weigh()
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
        numpyro.sample("z", dist.Normal(X @ w, 0.1), obs=y)


def shifted(X, y):
    w = weigh()
    observe(normal("shift", w[0]) + X @ w, 0.5, y)


def penalised(X, y):
    w = weigh()
    numpyro.factor("penalty", -jnp.sum(w**2))
    observe(X @ w, 0.5, y)


def factored(X, y):
    numpyro.factor("likelihood", -jnp.sum((y - X @ weigh()) ** 2))


def in_a_scan(X, y):
    w = scan(lambda carry, _: (carry, nss.spike_slab("w", 0.3)), 0.0, None, length=P)[1]
    observe(X @ w, 0.5, y)


def within(handler: Any) -> Callable:
    def weights(size):
        with handler:
            return nss.spike_slab("w", 0.25)

    return regression(weights=weights)


def computed(name: str, value: Callable) -> Callable:
    """A regression of which a handler computes the value of one site."""

    def function(site):
        return value(site) if site["name"] == name else None

    return handlers.substitute(PLAIN, substitute_fn=function)


def two_pairs(X, y=None):
    observe(X @ weigh() + X[:, :2] @ weigh("v", 2), 0.5, y)


def no_pairs(X, y=None):
    with numpyro.plate("feature", P):
        w = normal("w")
    observe(X @ w, 0.5, y)


AFFINE = ("'y'", "not affine", "['w']", "X @ w + offset")
ALONE = ("'y'", "spike or a slab of ['w'] on its own", "product")
OBSERVATIONS = ("observations of 'y' depend on the weights ['w']",)
COUNTS = ("the mask or the scale (of handlers.mask, handlers.scale) of 'y'", "['w']")
LEAVE = ("'w' is broken", "Leave both sites")
SET = ("'w' is broken", "'w' itself is set", "Leave it to spike_slab")
WEIGHED = ("'w' is broken", "masked or scaled", "likelihood alone")
PRIOR = ("'w' is broken", "the prior of", "Leave the prior to")
BENT, JOINT = ("affine", "parameter"), ("not elementwise",)
NO_PAIRS = ("no spike-and-slab weights", "spike_slab(name")
OF_V = {"v_spike": np.ones(2, int), "v_slab": np.ones(2)}
MODELS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "exp": (located(lambda X, w: jnp.exp(X @ w)), AFFINE),
    "indicator": (located(lambda X, w: X @ (w != 0.0)), AFFINE),
    "kink": (located(lambda X, w: X @ jnp.where(w > 0.0, w, 1.001 * w)), AFFINE),
    **{
        name: (regression(likelihood), ("'y'", name, *words, "DiscreteHMCGibbs"))
        for name, words, likelihood in (
            ("StudentT", BENT, lambda X, w: dist.StudentT(4.0, X @ w, jnp.exp(X @ w))),
            ("Poisson", BENT, lambda X, w: dist.Poisson((X @ w) ** 2 + jnp.exp(X[:, 0] * w[0]))),
            ("Gamma", JOINT, lambda X, w: dist.Gamma(2.0, jnp.exp(jnp.cumsum(jnp.tanh(X @ w))))),
            ("Categorical", BENT, lambda X, w: dist.Categorical(X @ w[:, None] * jnp.ones(2))),
        )
    },
    "slab for weight": (by_hand(lambda X, w, s, v: X @ v), ALONE),
    "slab": (by_hand(lambda X, w, s, v: X @ w + v[0]), ALONE),
    "a product of one's own": (by_hand(lambda X, w, s, v: X @ (s * v)), ALONE),
    "two sites": (two_sites, ("['y', 'z']", "one observed site", "Concatenate")),
    "noise": (
        regression(lambda X, w: dist.Normal(X @ w, jnp.exp(w[0]))),
        ("noise scale of 'y'", "weights", "Only its location may", "other sites, or"),
    ),
    "factor": (penalised, ("test: numpyro.factor('penalty', ...)", "['w']", "fn, obs=y")),
    "factor alone": (factored, ("test: numpyro.factor('likelihood', ...)", "obs=y")),
    "another prior": (
        shifted,
        ("'shift'", "depends on", "Only an observed site", "predicted, leave it out"),
    ),
    "in a scan": (in_a_scan, ("spike_slab('w'", "`scan`")),
    "observations": (by_hand(observations=lambda y, w, b: y + w[0]), OBSERVATIONS),
    "steps": (by_hand(observations=lambda y, w, b: y + (w[0] > 9.0)), OBSERVATIONS),
    "observations of a site": (
        by_hand(observations=lambda y, w, b: y + b),
        ("observations of 'y' depend on the latent sites ['b']",),
    ),
    "mask": (by_hand(around=lambda w: handlers.mask(mask=jnp.full(N, w[0] > 0.0))), COUNTS),
    "scale": (by_hand(around=lambda w: handlers.scale(scale=1.0 + w[0] ** 2)), COUNTS),
    "mask of a distribution": (by_hand(mask=lambda w: w[0] > 0.0), COUNTS),
    # pairs that spike_slab did not make so
    **{
        f"{site}, {name}": (change(site, value), (*LEAVE, f"'{site}'"))
        for site, value in {"w_spike": np.ones(P, int), "w_slab": np.ones(P)}.items()
        for name, change in {
            "condition": lambda site, value: handlers.condition(PLAIN, {site: value}),
            "substitute": lambda site, value: handlers.substitute(PLAIN, {site: value}),
            "do": lambda site, value: handlers.do(PLAIN, {site: value}),
            "computed": lambda site, value: computed(site, lambda _: jnp.asarray(value) * 1),
        }.items()
    },
    "hidden": (handlers.block(PLAIN, hide=["w_slab"]), (*LEAVE, "'w_slab'")),
    "reparameterised": (
        handlers.reparam(PLAIN, config={"w_slab": LocScaleReparam(0.0)}),
        (*LEAVE, "'w_slab'"),
    ),
    "weights set": (handlers.substitute(PLAIN, {"w": np.ones(P)}), SET),
    "weights scaled": (computed("w", lambda site: 2 * site["value"]), SET),
    **{
        f"one of two, {handler.__name__}": (
            handler(two_pairs, OF_V),
            ("'v' is broken", "'v_s", "handlers.condition"),
        )
        for handler in (handlers.do, handlers.substitute)
    },
    "masked weights": (within(handlers.mask(mask=False)), WEIGHED),
    "scaled weights": (within(handlers.scale(scale=0.5)), WEIGHED),
    "Laplace slab": (by_hand(slab=lambda b: dist.Laplace(0.0, 1.0)), (*PRIOR, "got Laplace")),
    "Binomial spike": (by_hand(spike=dist.Binomial(2, 0.25)), (*PRIOR, "got BinomialProbs")),
    "slab with a mean": (by_hand(slab=lambda b: dist.Normal(1.0, 1.0)), ("w", "slab", "mean")),
    "slab with a mean at some values": (
        by_hand(slab=lambda b: dist.Normal(jnp.where(b > 0.3, 1.0, 0.0), 1.0)),
        ("prior mean of the slabs of 'w'", "['b']"),
    ),
    "no pairs": (no_pairs, NO_PAIRS),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:init_to")
def test_models_are_refused_with_the_site_and_the_remedy(name):
    """Weights may only be in the location of one normal site, where they must be affine."""
    model, parts = MODELS[name]
    assert_says(read, model, (X, (Y > 0).astype(int)), *parts)


def test_one_of_two_pairs_may_be_held():
    assert read(handlers.condition(two_pairs, OF_V), X, Y).form.size == P


@pytest.mark.parametrize("site", ["w_spike", "w_slab", "w"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_values_that_the_caller_traces_are_seen_to_be_set(transform, site):
    def use(value):
        return read(handlers.substitute(PLAIN, {site: value}), X, Y).base.Y

    value = np.ones((1, P)) if transform is jax.vmap else np.ones(P)
    with pytest.raises(ValueError, match=f"'w' is broken.*'{site}'"):
        transform(use)(value)


# Who reads

HOLES = (X, with_entry(Y, 3, np.nan))
MANY = regression(lambda X, w: dist.Normal(X @ w, numpyro.sample("s", dist.HalfNormal(1.0))))
FREE = located(lambda X, w: jnp.exp(normal("a")) * (X @ w))
BLOCKS = Gibbs([(nss.PairedGibbs(PLAIN), nss.paired_sites)])
NOTHING = Gibbs([(nss.PairedGibbs(no_pairs), nss.paired_sites), (NUTS(no_pairs), None)])
WRONG_SHAPE = ("(4,)", "(3,)")
UNKNOWN = ("init_params", "'v'", "w_")
USES: dict[str, tuple[Callable, Any, tuple, dict, tuple[str, ...]]] = {
    "fit": (fit, PLAIN, HOLES, {}, ("observations of 'y'",)),
    "blocks": (sample, BLOCKS, HOLES, {}, ("PairedGibbs: the observations of 'y' are not finite",)),
    "fit, no pairs": (fit, no_pairs, (X, Y), {}, NO_PAIRS),
    "sampler, no pairs": (sample, no_pairs, (X, Y), {}, NO_PAIRS),
    "blocks, no pairs": (sample, NOTHING, (X, Y), {}, ("paired_sites: the model", *NO_PAIRS)),
    "guide, no pairs": (call(nss.PairedGuide), no_pairs, (X, Y), {}, ("PairedGuide", *NO_PAIRS)),
    "mean field": (call(nss.MeanFieldGuide), no_pairs, (X, Y), {}, ("MeanField", *NO_PAIRS)),
    "fit, start": (fit, PLAIN, (X, Y), {"v": np.zeros(P)}, UNKNOWN),
    "sampler, start": (sample, PLAIN, (X, Y), {"v": np.zeros(P)}, UNKNOWN),
    "fit, shape": (fit, PLAIN, (X, Y), {"w_auto_loc": np.zeros(4)}, ("w_auto_loc", *WRONG_SHAPE)),
    "sampler, shape": (sample, PLAIN, (X, Y), {"w_slab": np.zeros(4)}, ("w_slab", *WRONG_SHAPE)),
    "sampler, many": (sample, MANY, (np.tile(X, (5, 1)), np.tile(Y, 5)), {}, ("['s']", "NUTS")),
    "sampler, site": (sample, FREE, (X, Y), {}, ("['a']", "Gibbs([(PairedGibbs(model)")),
}


@pytest.mark.parametrize("name", USES)
def test_fits_samplers_and_guides_refuse_what_a_reader_refuses(name):
    use, model, args, params, parts = USES[name]
    assert_says(use, model, args, *parts, **({"init_params": params} if params else {}))
