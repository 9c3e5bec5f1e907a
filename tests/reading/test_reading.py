# SPDX-License-Identifier: Apache-2.0
"""What a Reader reads off a model, and what it says of models and data that do not fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.reparam import LocScaleReparam

import numpyro_spikeslab as nss
from numpyro_spikeslab.primitives import MARK, weights
from numpyro_spikeslab.reading.form import COLUMNS, SHARED, Pair
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.roles import NoiseRole

N, P = 8, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P))
Y = X @ [1.0, 0.0, -0.5] + 0.1 * RNG.normal(size=N)


def fit(model: Any, *args: Any, **kwargs: Any) -> nss.CAVIRunResult:
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    return svi.run(random.key(0), 3, *args, progress_bar=False, **kwargs)


def sample(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, **kwargs)
    return mcmc.get_samples()


def read(model: Any, *args: Any, **kwargs: Any) -> Reading:
    return Reader(model, "test")(args, kwargs)


# in one precision: JAX, given a numpy array once in each, may take its buffer from the other
pytestmark = pytest.mark.usefixtures("x64")
USERS: list[Callable] = [read, fit, sample]
EVERY_USER = pytest.mark.parametrize("use", USERS)


def regression(
    likelihood: Callable = lambda X, w: dist.Normal(X @ w, 0.5),
    weights: Callable = lambda size: nss.spike_slab("w", 0.25),
) -> Callable:
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = weights(X.shape[1])
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", likelihood(X, w), obs=y)

    return model


def located(location: Callable) -> Callable:
    return regression(lambda X, w: dist.Normal(location(X, w), 0.5))


def with_entry(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def assert_says(use: Callable, model: Any, args: tuple, *parts: str, **kwargs: Any) -> None:
    """An early error whose message, notes included, has all the parts."""
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        use(model, *args, **kwargs)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in parts if part not in message] == [], message


# Data


@EVERY_USER
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_design_must_be_finite(use, value):
    bad = with_entry(X, (2, 1), value)
    assert_says(use, regression(), (bad, Y), "['w']", "'y'", "not finite", "Remove NaN")


@EVERY_USER
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_observations_must_be_finite(use, value):
    bad = with_entry(Y, 3, value)
    assert_says(use, regression(), (X, bad), "observations of 'y'", "first at 3", "handlers.mask")


@EVERY_USER
def test_the_offset_must_be_finite(use):
    offset = with_entry(np.zeros(N), 5, np.nan)
    model = located(lambda X, w: offset + X @ w)
    assert_says(use, model, (X, Y), "location", "'y'", "first at 5", "Remove NaN")


def test_masked_observations_may_be_anything():
    def model(X, y, mask):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]), handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    seen = np.arange(N) != 3
    data = [(X, with_entry(Y, 3, value), seen) for value in (0.0, np.nan)]
    finite, missing = (Reader(model, "test")(args, {}) for args in data)
    jax.tree.map(np.testing.assert_array_equal, missing.base, finite.base)
    np.testing.assert_array_equal(missing.base.relative[:, 0], seen)


def test_observations_that_numpyro_imputes_are_latent_sites():
    def model(X, y, mask):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y, obs_mask=mask)

    parts = "'y_unobserved'", "handlers.mask`, not `obs_mask`"
    assert_says(read, model, (X, Y, np.arange(N) != 3), *parts)


@EVERY_USER
@pytest.mark.parametrize("column", [np.ones(N), X[:, 0]], ids=["constant", "duplicated"])
def test_constant_and_duplicated_features_are_no_errors(use, column):
    result = use(regression(), np.column_stack([X, column]), Y)
    values = {fit: lambda: result.params, read: lambda: result.design}.get(use, lambda: result)()
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(values))


@EVERY_USER
def test_there_must_be_observations(use):
    assert_says(use, regression(), (X, None), "'y'", "observ", "obs=y")


@EVERY_USER
@pytest.mark.parametrize("mask", [np.zeros(N, bool), False], ids=["array", "scalar"])
def test_some_observations_must_be_unmasked(use, mask):
    model = regression(lambda X, w: dist.Normal(X @ w, 0.5).mask(mask))
    assert_says(use, model, (X, Y), "no observ")


@EVERY_USER
def test_there_must_be_rows(use):
    assert_says(use, regression(), (X[:0], Y[:0]), "plate", "data")


@EVERY_USER
@pytest.mark.parametrize(
    "y", [Y[:, None], Y[None], Y[:5], np.append(Y, 0.0), Y[0]], ids=lambda y: str(np.shape(y))
)
def test_observations_must_have_the_shape_of_their_distribution(use, y):
    assert_says(use, regression(), (X, y), "'y'", str(y.shape), "(8,)", "same shape")


@EVERY_USER
def test_a_plate_must_have_the_size_of_the_features(use):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1] + 1):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    assert_says(use, model, (X, Y), "(3,)", "(4,)", "sizes of its plates")


@EVERY_USER
def test_plates_must_not_be_subsampled(use):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0], subsample_size=4) as rows:
            numpyro.sample("y", dist.Normal(X[rows] @ w, 0.5), obs=y[rows])

    assert_says(use, model, (X, Y), "['obs']", "subsample_size")


# Likelihoods


@EVERY_USER
@pytest.mark.parametrize(
    "location",
    [lambda X, w: jnp.exp(X @ w), lambda X, w: X @ w**2, lambda X, w: jax.nn.relu(X @ w)],
    ids=["exp", "square", "relu"],
)
def test_the_location_must_be_affine(use, location):
    assert_says(use, located(location), (X, Y), "'y'", "not affine", "['w']", "X @ w + offset")


@pytest.mark.parametrize(
    "location",
    [
        lambda X, w: X @ w + w[0] * w[1],
        lambda X, w: X @ jnp.tanh(0.01 * w),
        lambda X, w: X @ (w != 0.0),
        lambda X, w: X @ jnp.sort(w),
        lambda X, w: X @ jnp.where(w > 0.0, w, 1.001 * w),
    ],
    ids=["product", "tanh", "indicator", "sort", "kink"],
)
def test_almost_affine_is_not_affine(location):
    with pytest.raises(ValueError, match="not affine in the weights"):
        Reader(located(location), "test")((X, Y), {})


@EVERY_USER
@pytest.mark.parametrize(
    ("likelihood", "name"),
    [
        (lambda X, w: dist.StudentT(4.0, X @ w, 0.5), "StudentT"),
        (lambda X, w: dist.Bernoulli(logits=X @ w), "Bernoulli"),
        (lambda X, w: dist.Binomial(jnp.full(N, 5), logits=X @ w), "Binomial"),
        (lambda X, w: dist.Poisson(jnp.exp(X @ w)), "Poisson"),
    ],
    ids=["StudentT", "Bernoulli", "Binomial", "Poisson"],
)
def test_the_likelihood_must_be_normal(use, likelihood, name):
    y = (Y > 0).astype(int)
    assert_says(use, regression(likelihood), (X, y), "'y'", name, "Normal", "DiscreteHMCGibbs")


@EVERY_USER
def test_one_observed_site_may_depend_on_the_weights(use):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
            numpyro.sample("z", dist.Normal(X @ w, 0.1), obs=y)

    assert_says(use, model, (X, Y), "['y', 'z']", "one is supported", "Concatenate")


@EVERY_USER
def test_the_noise_must_not_depend_on_the_weights(use):
    model = regression(lambda X, w: dist.Normal(X @ w, jnp.exp(w[0])))
    assert_says(use, model, (X, Y), "noise scale of 'y'", "weights", "Only its location may")


@EVERY_USER
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_the_noise_must_be_positive_and_finite(use, scale):
    def model(X, y, scale):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, scale, validate_args=False), obs=y)

    assert_says(use, model, (X, Y, scale), "noise scale of 'y'", "positive")


@EVERY_USER
def test_the_prior_of_another_site_must_not_depend_on_the_weights(use):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        shift = numpyro.sample("shift", dist.Normal(w[0], 1.0))
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(shift + X @ w, 0.5), obs=y)

    parts = "'shift'", "depends on", "Only an observed Normal site", "predicted, leave it out"
    assert_says(use, model, (X, Y), *parts)


# Pairs


def by_hand(spike_prior: Any, slab_prior: Any, location: Callable) -> Callable:
    """A regression whose pair somebody has written without `spike_slab`."""

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            spike = numpyro.sample("w_spike", spike_prior, infer={MARK: ("w", "spike")})
            slab = numpyro.sample("w_slab", slab_prior, infer={MARK: ("w", "slab")})
            w = numpyro.deterministic("w", weights(spike, slab))
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(location(X, w, spike, slab), 0.5), obs=y)

    return model


SPIKE, SLAB = dist.Bernoulli(probs=0.25), dist.Normal(0.0, 1.0)


def within(handler: Callable) -> Callable:
    def weights(size):
        with handler():
            return nss.spike_slab("w", 0.25)

    return regression(weights=weights)


def computed(name, value):
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


@EVERY_USER
@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (handlers.condition(regression(), {"w_spike": np.ones(P, int)}), "w_spike"),
        (handlers.condition(regression(), {"w_slab": np.ones(P)}), "w_slab"),
        (handlers.substitute(regression(), {"w_spike": np.ones(P, int)}), "w_spike"),
        (handlers.substitute(regression(), {"w_slab": np.ones(P)}), "w_slab"),
        (handlers.do(regression(), {"w_spike": np.ones(P, int)}), "w_spike"),
        (handlers.do(regression(), {"w_slab": np.ones(P)}), "w_slab"),
        (computed("w_spike", lambda site: jnp.ones(P, int) * 1), "w_spike"),
        (computed("w_slab", lambda site: jnp.ones(P) * 1), "w_slab"),
        (handlers.block(regression(), hide=["w_slab"]), "w_slab"),
        (handlers.reparam(regression(), config={"w_slab": LocScaleReparam(0.0)}), "w_slab"),
    ],
    ids=[
        "spike observed",
        "slab observed",
        "spike set",
        "slab set",
        "spike intervened on",
        "slab intervened on",
        "spike computed",
        "slab computed",
        "hidden",
        "reparameterised",
    ],
)
@pytest.mark.filterwarnings("ignore:init_to")
def test_both_sites_of_a_pair_must_be_latent(use, model, lost):
    assert_says(use, model, (X, Y), "'w' is broken", f"'{lost}'", "Leave both sites")


@EVERY_USER
@pytest.mark.parametrize(
    "model",
    [
        handlers.substitute(regression(), {"w": np.ones(P)}),
        computed("w", lambda site: jnp.ones(P) * 1),
        computed("w", lambda site: 2 * site["value"]),
    ],
    ids=["data", "computed", "of the weights"],
)
def test_the_weights_themselves_must_not_be_set(use, model):
    assert_says(use, model, (X, Y), "'w' is broken", "'w' itself is set", "Leave it to spike_slab")


@EVERY_USER
@pytest.mark.parametrize("handler", [handlers.do, handlers.substitute])
def test_one_of_two_pairs_may_be_held_but_not_set(use, handler):
    values = {"v_spike": np.ones(2, int), "v_slab": np.ones(2)}
    message = ("'v' is broken", "'v_s", "handlers.condition")
    assert_says(use, handler(two_pairs, values), (X, Y), *message)
    use(handlers.condition(two_pairs, values), X, Y)


@pytest.mark.parametrize("site", ["w_spike", "w_slab", "w"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_values_that_the_caller_traces_are_seen_to_be_set(transform, site):
    def use(value):
        model = handlers.substitute(regression(), {site: value})
        return fit(model, X, Y).losses

    value = np.ones((1, P)) if transform is jax.vmap else np.ones(P)
    with pytest.raises(ValueError, match=f"'w' is broken.*'{site}'"):
        transform(use)(value)


@EVERY_USER
@pytest.mark.parametrize(
    ("model", "got", "remedy"),
    [
        (within(lambda: handlers.mask(mask=False)), "a masked or scaled Bern", "likelihood alone"),
        (
            within(lambda: handlers.mask(mask=np.arange(P) > 0)),
            "a masked or scaled Bernoulli",
            "around the likelihood alone",
        ),
        (within(lambda: handlers.scale(scale=0.5)), "masked or scaled", "likelihood alone"),
        (
            by_hand(SPIKE, dist.Laplace(0.0, 1.0), lambda X, w, s, v: X @ w),
            "got Laplace",
            "Leave the prior to",
        ),
        (
            by_hand(dist.Binomial(2, 0.25), SLAB, lambda X, w, s, v: X @ w),
            "got BinomialProbs",
            "Leave the prior to",
        ),
    ],
    ids=["masked", "partly masked", "scaled", "Laplace slab", "Binomial spike"],
)
def test_the_prior_of_a_pair_must_be_that_of_spike_slab(use, model, got, remedy):
    assert_says(use, model, (X, Y), "'w' is broken", "the prior of", got, remedy)


@EVERY_USER
def test_the_slab_must_have_mean_zero(use):
    model = by_hand(SPIKE, dist.Normal(1.0, 1.0), lambda X, w, s, v: X @ w)
    assert_says(use, model, (X, Y), "w", "slab", "mean")


@EVERY_USER
@pytest.mark.parametrize(
    "location",
    [
        lambda X, w, s, v: X @ v,
        lambda X, w, s, v: X @ w + s[0],
        lambda X, w, s, v: X @ w + v[0],
        lambda X, w, s, v: X @ (s * v),
    ],
    ids=["slab for weight", "spike", "slab", "a product of one's own"],
)
def test_the_likelihood_must_see_the_product_alone(use, location):
    model = by_hand(SPIKE, SLAB, location)
    assert_says(use, model, (X, Y), "'y'", "spike or a slab of ['w'] on its own", "product")


@EVERY_USER
@pytest.mark.parametrize("inclusion", [0.0, 1.0, 1.5, -0.1, np.nan, np.array([0.1, 0.2, 1.0])])
def test_inclusion_must_lie_between_0_and_1(use, inclusion):
    model = regression(weights=lambda size: nss.spike_slab("w", inclusion))
    assert_says(use, model, (X, Y), "spike_slab('w')", "`inclusion`", str(inclusion), "between 0")


@EVERY_USER
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.array([1.0, 0.0, 1.0])])
def test_scale_must_be_positive(use, scale):
    model = regression(weights=lambda size: nss.spike_slab("w", 0.25, scale))
    assert_says(use, model, (X, Y), "spike_slab('w')", "`scale`", str(scale), "between 0")


def no_pairs(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


@pytest.mark.parametrize("guide", [nss.PairedGuide, nss.MeanFieldGuide])
def test_a_guide_needs_pairs(guide):
    with pytest.raises(ValueError, match=rf"{guide.__name__}.*no spike-and-slab.*spike_slab\("):
        handlers.seed(guide(no_pairs), 0)(X, Y)


@EVERY_USER
def test_a_fit_needs_pairs(use):
    assert_says(use, no_pairs, (X, Y), "no spike-and-slab weights", "spike_slab(name")


@pytest.mark.parametrize("use", [fit, sample])
@pytest.mark.parametrize(("name", "known"), [("v", "w_")], ids=["unknown"])
def test_init_params_must_be_known(use, name, known):
    params = {name: np.zeros(P)}
    assert_says(use, regression(), (X, Y), "init_params", f"'{name}'", known, init_params=params)


@pytest.mark.parametrize(("use", "name"), [(fit, "w_auto_loc"), (sample, "w_slab")])
def test_init_params_must_have_the_shape_of_the_site(use, name):
    params = {name: np.zeros(P + 1)}
    assert_says(use, regression(), (X, Y), f"'{name}'", "(4,)", "(3,)", init_params=params)


def test_other_latent_sites_need_a_block_of_their_own():
    model = regression(
        lambda X, w: dist.Normal(X @ w, numpyro.sample("sigma", dist.HalfNormal(1.0)))
    )
    assert_says(sample, model, (X, Y), "['sigma']", "Gibbs([(PairedGibbs(model)")


def test_a_composite_reports_the_same_errors():
    model = regression()
    kernel = Gibbs([(nss.PairedGibbs(model), nss.paired_sites)])
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="PairedGibbs: the observations of 'y' are not finite"):
        mcmc.run(random.key(0), X, with_entry(Y, 3, np.nan))


# The design


def noisy(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(numpyro.param("shift", 0.5) + X @ w, sigma), obs=y)


def two_sets(X, y=None):
    with numpyro.plate("first", 1):
        a = nss.spike_slab("a", 0.25)
    with numpyro.plate("rest", X.shape[1] - 1):
        b = nss.spike_slab("b", 0.5)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, :1] @ a + X[:, 1:] @ b, 0.5), obs=y)


def without_plate(X, y=None):
    w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, 0] * w, 0.5), obs=y)


SD = X.std(axis=0)
GROUP = np.arange(N) % P
DESIGNS = {
    "matrix product": (located(lambda X, w: X @ w), X),
    "offset": (located(lambda X, w: 2.0 + X @ w - 1.0), X),
    "standardised": (located(lambda X, w: (X / X.std(0)) @ w), X / SD),
    "rescaled weights": (located(lambda X, w: X @ (w / SD)), X / SD),
    "einsum": (located(lambda X, w: jnp.einsum("nm,m->n", X, w)), X),
    "sum": (located(lambda X, w: jnp.sum(X * w, -1)), X),
    "transposed": (located(lambda X, w: w @ X.T), X),
    "permuted": (located(lambda X, w: X @ w[::-1]), X[:, ::-1]),
    "groups": (located(lambda X, w: w[GROUP]), np.eye(P)[GROUP]),
    "two sets": (two_sets, X),
    "no plate": (without_plate, X[:, :1]),
    "other latent sites": (noisy, X),
    "noise per observation": (
        regression(lambda X, w: dist.Normal(X @ w, jnp.linspace(1.0, 2.0, N))),
        X / np.linspace(1.0, 2.0, N)[:, None],
    ),
    "masked": (
        regression(lambda X, w: dist.Normal(X @ w, 0.5).mask(jnp.arange(N) > 2)),
        X * (np.arange(N) > 2)[:, None],
    ),
}


def rows(design: Any, size: int) -> np.ndarray:
    return np.asarray(design.rows).reshape(-1, design.rows.shape[-1])[:size]


@pytest.mark.parametrize("name", DESIGNS)
def test_the_design_is_what_multiplies_the_weights(name):
    model, expected = DESIGNS[name]
    reading = Reader(model, "test")((X, Y), {})
    assert reading.form.kind == COLUMNS
    assert reading.form.constant_design
    assert reading.form.size == expected.shape[1]
    found = rows(reading.design, reading.form.size)
    np.testing.assert_allclose(found, expected.T, rtol=1e-12, atol=1e-14)


def test_a_copied_design_is_exact():
    reading = Reader(regression(), "test")((X, Y), {})
    np.testing.assert_array_equal(rows(reading.design, P), X.T)


@pytest.mark.parametrize("block_size", [1, 2, 3, 50])
def test_blocks_hold_all_features_and_their_gram(block_size):
    reading = read(regression(), X, Y)
    reading.block_size = block_size
    design = reading.design
    np.testing.assert_allclose(rows(design, P), X.T)
    for block, gram in zip(design.rows, design.gram, strict=True):
        np.testing.assert_allclose(gram, block @ block.T, atol=1e-14)


def test_tasks_share_no_weights():
    def model(X, Y=None):
        with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
            W = nss.spike_slab("W", 0.25)
        with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("task_", 2, dim=-1):
            numpyro.sample("Y", dist.Normal(X @ W.T, 0.5), obs=Y)

    args = X, np.stack([Y, -Y], axis=1)
    reading = Reader(model, "test", joint=True)(args, {})
    found = rows(reading.design, 2 * P).reshape(2, P, N, 2)
    expected = np.einsum("nm,qr->qmnr", X, np.eye(2))
    np.testing.assert_allclose(found, expected, atol=1e-14)
    assert reading.form.pairs == (Pair("W", (2, P)),)
    assert reading.design.rows.shape[0] == 1
    shared = read(model, *args)
    assert shared.form.kind == SHARED and shared.design is None
    np.testing.assert_allclose(shared.features, X.T, atol=1e-14)


def test_one_task_of_many_may_have_a_feature_of_its_own(precision):
    """A random direction of all weights alone would hide it where its own weight is small."""
    rng, (rows, tasks, features) = np.random.default_rng(0), (8, 200, 8)
    X, Y = jnp.asarray(rng.normal(size=(rows, features))), jnp.zeros((rows, tasks))

    def model(own, Y):
        with numpyro.plate("task", tasks, dim=-2), numpyro.plate("feature", features, dim=-1):
            W = nss.spike_slab("W", 0.25)
        with numpyro.plate("obs", rows, dim=-2), numpyro.plate("task_", tasks, dim=-1):
            numpyro.sample("Y", dist.Normal(X @ W.T + X[:, :1] * W[:, 5] * own, 0.5), obs=Y)

    assert read(model, jnp.zeros(tasks), Y).form.kind == SHARED
    for task in range(0, tasks, 20):
        own = jnp.zeros(tasks).at[task].set(2e-3)
        assert read(model, own, Y).form.kind == COLUMNS


def test_rows_without_observations_may_be_anything_for_tasks_too():
    def model(X, Y):
        with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", P, dim=-1):
            W = nss.spike_slab("W", 0.25)
        seen = handlers.mask(mask=~jnp.isnan(Y))
        with numpyro.plate("obs", N, dim=-2), numpyro.plate("task_", 3, dim=-1), seen:
            numpyro.sample("Y", dist.Normal(X @ W.T, 0.5), obs=Y)

    holes, Y3 = np.array(X), np.stack([Y, -Y, 2 * Y], axis=1)
    holes[3], Y3[3] = np.nan, np.nan
    found = read(model, holes, Y3)
    assert found.form.kind == SHARED
    np.testing.assert_allclose(found.features, np.nan_to_num(holes).T)


@pytest.mark.parametrize("tasks", [2, P + 3])
@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_features_of_tasks_are_shared_or_not_however_small(tasks, size):
    """The last task has a column that is zero in all others."""
    designs = np.tile(X, (tasks, 1, 1))
    designs[:, :, 0] = 0.0
    designs[-1, :, 0] = size

    def model(designs, Y=None):
        with numpyro.plate("task", tasks, dim=-2), numpyro.plate("feature", P, dim=-1):
            W = nss.spike_slab("W", 0.25)
        with numpyro.plate("obs", N, dim=-2), numpyro.plate("task_", tasks, dim=-1):
            location = jnp.einsum("qnm,qm->nq", designs, W)
            numpyro.sample("Y", dist.Normal(location, 0.5), obs=Y)

    found = read(model, jnp.asarray(designs), jnp.zeros((N, tasks)))
    assert (found.form.kind == SHARED) == (size == 0.0)
    if size == 0.0:
        np.testing.assert_allclose(found.features, designs[0].T, atol=1e-14)


def test_what_a_form_says():
    form = read(noisy, X, Y).form
    assert form.pairs == (Pair("w", (P,)),)
    assert form.likelihood == "y"
    assert set(form.others) == {"sigma", "shift"}
    assert form.roles == (NoiseRole("sigma", True),) and form.free == ("shift",)
    assert not form.varying_noise


def rescaled(X, y=None):
    gain = numpyro.sample("gain", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal((X * gain) @ w, 0.5), obs=y)


def heteroscedastic(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, jnp.exp(slope * X[:, 0])), obs=y)


@pytest.mark.parametrize(
    ("model", "latents", "expected"),
    [
        (rescaled, {"gain": 3.0}, 3.0 * X),
        (heteroscedastic, {"slope": 0.5}, X * np.exp(-0.5 * X[:, :1])),
    ],
    ids=["location", "noise"],
)
def test_a_design_may_depend_on_other_sites(model, latents, expected):
    reading = read(model, X, Y)
    assert not reading.form.constant_design
    assert reading.design is None and reading.base is None
    design = reading.design_at({name: jnp.asarray(value) for name, value in latents.items()})
    np.testing.assert_allclose(rows(design, P), expected.T, rtol=1e-12)


@pytest.mark.parametrize(
    "convert",
    [np.float64, np.float32, np.int32, jnp.float32, jnp.float64, jnp.int32],
    ids=["numpy f64", "numpy f32", "numpy int", "jax f32", "jax f64", "jax int"],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_data_may_have_any_type(precision, convert):
    inputs = convert(np.round(4 * X))
    reading = Reader(regression(), "test")((inputs, convert(np.round(Y))), {})
    assert reading.design.rows.dtype == precision
    np.testing.assert_array_equal(rows(reading.design, P), np.round(4 * X).T)


# Reading again


def counted(calls: list) -> Callable:
    model = regression()

    def counting(X, y=None, scale=1.0):
        calls.append(None)
        model(scale * X, y)

    return counting


def test_the_same_arguments_are_read_once():
    read = Reader(counted([]), "test")
    first = read((X, Y), {})
    assert read((X, Y), {}) is first
    assert read((X.copy(), jnp.asarray(Y)), {}) is not first
    again = read((X, Y), {"scale": 2.0})
    assert again is not first
    assert read((X, Y), {"scale": 2.0}) is again


def test_new_arguments_are_read():
    read = Reader(counted([]), "test")
    first = read((X, Y), {})
    np.testing.assert_allclose(rows(read((2 * X, Y), {}).design, P), 2 * X.T)
    np.testing.assert_allclose(rows(read((X, Y), {"scale": 3.0}).design, P), 3 * X.T)
    np.testing.assert_allclose(rows(read((X[:5], Y[:5]), {}).design, P), X[:5].T)
    np.testing.assert_array_equal(read((X, 2 * Y), {}).base.Y[:, 0], 2 * Y)
    np.testing.assert_array_equal(read((X, Y), {}).design.rows, first.design.rows)


def test_an_array_changed_in_place_is_read_again():
    inputs = X.copy()
    read = Reader(regression(), "test")
    read((inputs, Y), {})
    inputs *= 2.0
    np.testing.assert_allclose(rows(read((inputs, Y), {}).design, P), 2 * X.T)


def test_supports_that_depend_on_other_sites_are_not_those_of_some_values():
    def model(X, y, most):
        sigma = numpyro.sample("sigma", dist.Gamma(2.0, 1.0))
        numpyro.sample("of data", dist.Uniform(0.0, most).expand([2]).to_event(1))
        numpyro.sample("of a site", dist.Uniform(0.0, 4 * sigma))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    X, y = np.ones((5, 2)), np.arange(5.0)
    for most in (1.0, 3.0):
        supports = Reader(model, "CAVI")((X, y, most), {}).supports
        assert supports["of a site"] is None and supports["sigma"] is not None
        np.testing.assert_allclose(supports["of data"].feasible_like(jnp.zeros(2)), most / 2)


def test_reading_works_under_transformations_of_the_caller():
    read = Reader(regression(), "test")
    data = jnp.asarray(X), jnp.asarray(Y)

    def gram(X, y):
        return read((X, y), {}).design.gram

    np.testing.assert_allclose(jax.jit(gram)(*data), gram(*data))
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), data)
    batch = jax.vmap(gram)(*stacked)
    np.testing.assert_allclose(batch, jnp.stack([gram(*data), 4 * gram(*data)]))


def test_constant_data_stay_constant_under_transformations():
    """What a caller's transformation does not touch is read once, outside of it."""
    read = Reader(regression(), "test")
    first = read((X, Y), {})
    same = []

    def use(x):
        same.append(read((X, Y), {}) is first)
        return x * first.design.gram

    np.testing.assert_allclose(jax.jit(use)(2.0), 2 * first.design.gram)
    assert same == [True]


def test_traced_data_are_checked_as_far_as_they_can_be():
    def bent(X, y):
        return read(regression(lambda X, w: dist.StudentT(4.0, X @ w)), X, y).base.Y

    def missing(X, y):
        return read(regression(), X, with_nan(y)).design.gram

    def with_nan(y):
        return y.at[3].set(jnp.nan)

    with pytest.raises(ValueError, match="likelihood StudentT"):
        jax.jit(bent)(X, Y)
    assert np.isfinite(jax.jit(missing)(X, jnp.asarray(Y))).all()


def test_a_fit_of_traced_data():
    assert np.isfinite(jax.jit(lambda X, y: fit(regression(), X, y).losses)(X, Y)).all()
