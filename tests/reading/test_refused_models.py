# SPDX-License-Identifier: Apache-2.0
"""Models and data that are refused, with messages that name the site and the remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.reparam import LocScaleReparam

import numpyro_spikeslab as nss
from numpyro_spikeslab.primitives import MARK, weights
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

N, P = 8, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P))
Y = X @ [1.0, 0.0, -0.5] + 0.1 * RNG.normal(size=N)


def read(model: Any, *args: Any, **kwargs: Any) -> Any:
    return Reader(model, "test")(args, kwargs)


def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    return svi.run(random.key(0), 3, *args, progress_bar=False, **kwargs)


def sample(model: Any, *args: Any, **kwargs: Any) -> Any:
    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, **kwargs)


def assert_says(use: Callable, model: Any, args: tuple, *parts: str, **kwargs: Any) -> None:
    """An early error whose message, notes included, has all the parts."""
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        use(model, *args, **kwargs)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in parts if part not in message] == [], message


def regression(
    likelihood: Callable = lambda X, w: dist.Normal(X @ w, 0.5),
    weights: Callable = lambda size: nss.spike_slab("w", 0.25),
    extra: int = 0,
    **plate: Any,
) -> Callable:
    """A regression; the arguments say in what it differs from the plain one."""

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1] + extra):
            w = weights(X.shape[1])
        with numpyro.plate("obs", X.shape[0], **plate) as rows:
            seen = y[rows] if plate else y
            numpyro.sample("y", likelihood(X[rows] if plate else X, w), obs=seen)

    return model


def located(location: Callable) -> Callable:
    return regression(lambda X, w: dist.Normal(location(X, w), 0.5))


def with_entry(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def noisy(scale: float) -> Callable:
    return regression(lambda X, w: dist.Normal(X @ w, scale, validate_args=False))


def imputed(X, y):
    with numpyro.plate("feature", P):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y, obs_mask=np.arange(N) != 3)


# Data

PLAIN = regression()
DATA: dict[str, tuple[Callable, tuple, tuple[str, ...]]] = {
    **{
        f"design {value}": (
            PLAIN,
            (with_entry(X, (2, 1), value), Y),
            ("['w']", "'y'", "not finite", "Remove NaN"),
        )
        for value in (np.nan, np.inf)
    },
    **{
        f"observations {value}": (
            PLAIN,
            (X, with_entry(Y, 3, value)),
            ("observations of 'y'", "first at 3", "handlers.mask"),
        )
        for value in (np.nan, -np.inf)
    },
    "offset": (
        located(lambda X, w: with_entry(np.zeros(N), 5, np.nan) + X @ w),
        (X, Y),
        ("location", "'y'", "first at 5", "Remove NaN"),
    ),
    "imputed by NumPyro": (
        imputed,
        (X, Y),
        ("'y_unobserved'", "handlers.mask`, not `obs_mask`"),
    ),
    "no observations": (PLAIN, (X, None), ("'y'", "observ", "obs=y")),
    **{
        f"all masked, {name}": (
            regression(lambda X, w, mask=mask: dist.Normal(X @ w, 0.5).mask(mask)),
            (X, Y),
            ("no observ",),
        )
        for name, mask in (("array", np.zeros(N, bool)), ("scalar", False))
    },
    "no rows": (PLAIN, (X[:0], Y[:0]), ("plate", "data")),
    **{
        f"shape {np.shape(y)}": (
            PLAIN,
            (X, y),
            ("'y'", str(np.shape(y)), "(8,)", "same shape"),
        )
        for y in (Y[:, None], Y[None], Y[:5], np.append(Y, 0.0), Y[0])
    },
    "plate too large": (regression(extra=1), (X, Y), ("(3,)", "(4,)", "sizes of its plates")),
    "subsampled": (regression(subsample_size=4), (X, Y), ("['obs']", "subsample_size")),
    **{
        f"noise {scale}": (noisy(scale), (X, Y), ("noise scale of 'y'", "positive"))
        for scale in (0.0, -1.0, np.nan, np.inf)
    },
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_do_not_fit_are_refused(name):
    model, args, parts = DATA[name]
    assert_says(read, model, args, *parts)


# Likelihoods


def two_sites(X, y):
    with numpyro.plate("feature", P):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
        numpyro.sample("z", dist.Normal(X @ w, 0.1), obs=y)


def shifted(X, y):
    with numpyro.plate("feature", P):
        w = nss.spike_slab("w", 0.25)
    shift = numpyro.sample("shift", dist.Normal(w[0], 1.0))
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(shift + X @ w, 0.5), obs=y)


def by_hand(
    location: Callable = lambda X, w, s, v: X @ w,
    spike: Any = dist.Bernoulli(probs=0.25),  # noqa: B008
    slab: Any = dist.Normal(0.0, 1.0),  # noqa: B008
) -> Callable:
    """A regression whose pair somebody has written without `spike_slab`."""

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            s = numpyro.sample("w_spike", spike, infer={MARK: ("w", "spike")})
            v = numpyro.sample("w_slab", slab, infer={MARK: ("w", "slab")})
            w = numpyro.deterministic("w", weights(s, v))
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(location(X, w, s, v), 0.5), obs=y)

    return model


NOT_AFFINE = {
    "exp": lambda X, w: jnp.exp(X @ w),
    "square": lambda X, w: X @ w**2,
    "relu": lambda X, w: jax.nn.relu(X @ w),
    "product": lambda X, w: X @ w + w[0] * w[1],
    "tanh": lambda X, w: X @ jnp.tanh(0.01 * w),
    "indicator": lambda X, w: X @ (w != 0.0),
    "sort": lambda X, w: X @ jnp.sort(w),
    "kink": lambda X, w: X @ jnp.where(w > 0.0, w, 1.001 * w),
}
OTHERS = {
    "StudentT": lambda X, w: dist.StudentT(4.0, X @ w, 0.5),
    "Bernoulli": lambda X, w: dist.Bernoulli(logits=X @ w),
    "Binomial": lambda X, w: dist.Binomial(jnp.full(N, 5), logits=X @ w),
    "Poisson": lambda X, w: dist.Poisson(jnp.exp(X @ w)),
}
NOT_THE_PRODUCT = {
    "slab for weight": lambda X, w, s, v: X @ v,
    "spike": lambda X, w, s, v: X @ w + s[0],
    "slab": lambda X, w, s, v: X @ w + v[0],
    "a product of one's own": lambda X, w, s, v: X @ (s * v),
}
LIKELIHOODS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    **{
        k: (located(x), ("'y'", "not affine", "['w']", "X @ w + offset"))
        for k, x in NOT_AFFINE.items()
    },
    **{k: (regression(x), ("'y'", k, "Normal", "DiscreteHMCGibbs")) for k, x in OTHERS.items()},
    **{
        k: (by_hand(x), ("'y'", "spike or a slab of ['w'] on its own", "product"))
        for k, x in NOT_THE_PRODUCT.items()
    },
    "two sites": (two_sites, ("['y', 'z']", "one is supported", "Concatenate")),
    "noise": (
        regression(lambda X, w: dist.Normal(X @ w, jnp.exp(w[0]))),
        ("noise scale of 'y'", "weights", "Only its location may"),
    ),
    "another prior": (
        shifted,
        ("'shift'", "depends on", "Only an observed Normal site", "predicted, leave it out"),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_that_are_not_normal_and_affine_are_refused(name):
    model, parts = LIKELIHOODS[name]
    assert_says(read, model, (X, (Y > 0).astype(int)), *parts)


# Pairs


def within(handler: Callable) -> Callable:
    def weights(size):
        with handler():
            return nss.spike_slab("w", 0.25)

    return regression(weights=weights)


def computed(name: str, value: Callable) -> Callable:
    """A regression of which a handler computes the value of one site."""

    def function(site):
        return value(site) if site["name"] == name else None

    return handlers.substitute(regression(), substitute_fn=function)


def two_pairs(X, y=None):
    with numpyro.plate("feature", P):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("other", 2):
        v = nss.spike_slab("v", 0.25)
    with numpyro.plate("obs", len(X)):
        numpyro.sample("y", dist.Normal(X @ w + X[:, :2] @ v, 0.5), obs=y)


def no_pairs(X, y=None):
    with numpyro.plate("feature", P):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


ONES = {"w_spike": np.ones(P, int), "w_slab": np.ones(P)}
BROKEN: dict[str, tuple[Callable, tuple[str, ...]]] = {
    **{
        f"{site} of {handler.__name__}": (
            handler(regression(), {site: value}),
            ("'w' is broken", f"'{site}'", "Leave both sites"),
        )
        for handler in (handlers.condition, handlers.substitute, handlers.do)
        for site, value in ONES.items()
    },
    **{
        f"{site} computed": (
            computed(site, lambda _, value=value: jnp.asarray(value) * 1),
            ("'w' is broken", f"'{site}'", "Leave both sites"),
        )
        for site, value in ONES.items()
    },
    "hidden": (
        handlers.block(regression(), hide=["w_slab"]),
        ("'w' is broken", "'w_slab'", "Leave both sites"),
    ),
    "reparameterised": (
        handlers.reparam(regression(), config={"w_slab": LocScaleReparam(0.0)}),
        ("'w' is broken", "'w_slab'", "Leave both sites"),
    ),
    **{
        f"weights {name}": (
            model,
            ("'w' is broken", "'w' itself is set", "Leave it to spike_slab"),
        )
        for name, model in {
            "set": handlers.substitute(regression(), {"w": np.ones(P)}),
            "computed": computed("w", lambda site: jnp.ones(P) * 1),
            "scaled": computed("w", lambda site: 2 * site["value"]),
        }.items()
    },
    **{
        f"one of two, {handler.__name__}": (
            handler(two_pairs, {"v_spike": np.ones(2, int), "v_slab": np.ones(2)}),
            ("'v' is broken", "'v_s", "handlers.condition"),
        )
        for handler in (handlers.do, handlers.substitute)
    },
    **{
        name: (within(handler), ("'w' is broken", "masked or scaled", "likelihood alone"))
        for name, handler in {
            "masked": lambda: handlers.mask(mask=False),
            "partly masked": lambda: handlers.mask(mask=np.arange(P) > 0),
            "scaled": lambda: handlers.scale(scale=0.5),
        }.items()
    },
    "Laplace slab": (
        by_hand(slab=dist.Laplace(0.0, 1.0)),
        ("'w' is broken", "the prior of", "got Laplace", "Leave the prior to"),
    ),
    "Binomial spike": (
        by_hand(spike=dist.Binomial(2, 0.25)),
        ("'w' is broken", "the prior of", "got BinomialProbs", "Leave the prior to"),
    ),
    "slab with a mean": (by_hand(slab=dist.Normal(1.0, 1.0)), ("w", "slab", "mean")),
    "no pairs": (no_pairs, ("no spike-and-slab weights", "spike_slab(name")),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore:init_to")
def test_pairs_that_spike_slab_did_not_make_so_are_refused(name):
    model, parts = BROKEN[name]
    assert_says(read, model, (X, Y), *parts)


def test_one_of_two_pairs_may_be_held():
    values = {"v_spike": np.ones(2, int), "v_slab": np.ones(2)}
    assert read(handlers.condition(two_pairs, values), X, Y).form.size == P


@pytest.mark.parametrize("site", ["w_spike", "w_slab", "w"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_values_that_the_caller_traces_are_seen_to_be_set(transform, site):
    def use(value):
        return read(handlers.substitute(regression(), {site: value}), X, Y).base.Y

    value = np.ones((1, P)) if transform is jax.vmap else np.ones(P)
    with pytest.raises(ValueError, match=f"'w' is broken.*'{site}'"):
        transform(use)(value)


def test_weights_inside_of_a_scan_are_refused():
    def model(X, y):
        w = scan(lambda carry, _: (carry, nss.spike_slab("w", 0.3)), 0.0, None, length=P)[1]
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    assert_says(read, model, (X, Y), "spike_slab('w'", "`scan`")


def test_there_may_be_constant_and_duplicated_columns():
    design = read(regression(), np.column_stack([X, np.ones(N), X[:, 0]]), Y).design
    assert np.all(np.isfinite(design.rows))


# Who reads


@pytest.mark.parametrize("use", [fit, sample])
def test_fits_and_samplers_refuse_what_a_reader_refuses(use):
    assert_says(use, regression(), (X, with_entry(Y, 3, np.nan)), "observations of 'y'")
    assert_says(use, no_pairs, (X, Y), "no spike-and-slab weights")
    parts = "init_params", "'v'", "w_"
    assert_says(use, regression(), (X, Y), *parts, init_params={"v": np.zeros(P)})


@pytest.mark.parametrize("guide", [nss.PairedGuide, nss.MeanFieldGuide])
def test_a_guide_needs_pairs(guide):
    with pytest.raises(ValueError, match=rf"{guide.__name__}.*no spike-and-slab.*spike_slab\("):
        handlers.seed(guide(no_pairs), 0)(X, Y)


@pytest.mark.parametrize(("use", "name"), [(fit, "w_auto_loc"), (sample, "w_slab")])
def test_init_params_must_have_the_shape_of_the_site(use, name):
    params = {name: np.zeros(P + 1)}
    assert_says(use, regression(), (X, Y), f"'{name}'", "(4,)", "(3,)", init_params=params)


def test_other_latent_sites_need_a_block_of_their_own():
    def noise(X, w):
        return dist.Normal(X @ w, numpyro.sample("sigma", dist.HalfNormal(1.0)))

    assert_says(sample, regression(noise), (X, Y), "['sigma']", "Gibbs([(PairedGibbs(model)")


def test_a_composite_reports_the_same_errors():
    kernel = Gibbs([(nss.PairedGibbs(PLAIN), nss.paired_sites)])
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="PairedGibbs: the observations of 'y' are not finite"):
        mcmc.run(random.key(0), X, with_entry(Y, 3, np.nan))
