# SPDX-License-Identifier: Apache-2.0
"""Every kernel keeps the joint density of its model, and has the posterior of all models."""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats
from test_latent_gibbs import SEEN, X as INPUTS, composite, whole_model
import truth
from truth import joint_noise

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.primitives import ENTRIES_MARK
from numpyro_spikeslab.sampling import weights_of_function

KEY = random.key(0)

# Models that have everything at once


def columns_model(X, Y=None, *, groups=None):
    """Coefficients with a coefficient as their prior mean, unknown scales, two sets of weights.
    The scales of effects and slopes are entries of one site."""
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 0.5))
    inclusion = numpyro.sample("inclusion", dist.Uniform(0.05, 0.95))
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(0.3, 1.0))
    spread = numpyro.sample("spread", dist.LogNormal(-0.4, 0.5).expand([2]).to_event(1))
    half = jnp.arange(len(X)) % 2
    with numpyro.plate("half", 2):
        effect = numpyro.sample("effect", dist.Normal(0.5 * level, spread[0]))
        slope = numpyro.sample("slope", dist.Normal(0.0, spread[1]))
    if groups is None:
        w = truth.weights(3, inclusion, scale)
    else:
        w = nss.spike_slab("w", inclusion, scale, groups=groups)
    v = truth.weights(X.shape[1] - 3, 0.4, name="v", plate="other")
    location = level + effect[half] + slope[half] * X[:, 2] + X[:, :3] @ w + X[:, 3:] @ v
    with numpyro.plate("obs", len(X)):
        numpyro.sample("Y", dist.Normal(location, sigma), obs=Y)


def scales_model(X, Z, Y=None):
    """Noise that is the root of a sum, of scales that two groups share, and a log-linear factor."""
    alone = numpyro.sample("alone", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("group", 2):
        shared = numpyro.sample("shared", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.3, 1.0))
    scale = jnp.sqrt(alone**2 + Z**2 * shared[jnp.arange(len(X)) % 2] ** 2) * jnp.exp(slope * Z)
    with numpyro.plate("obs", len(X)):
        numpyro.sample("Y", dist.Normal(level + X @ truth.weights(4), scale), obs=Y)


def entries_model(rows, columns, Y=None):
    """Three groups of noise, the last without an entry."""
    inclusion = numpyro.sample("inclusion", dist.Beta(2, 2))
    slab = numpyro.sample("slab_scale", dist.HalfNormal(1.5))
    phi = nss.latent_functions("phi", ["white"] * 2, np.arange(5))
    W = truth.task_weights(4, 2, inclusion, slab)
    with numpyro.plate("task", 4):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = jnp.sum(phi.T[rows] * W[columns], axis=1)
    with numpyro.plate("entry", len(rows)):
        mark = {ENTRIES_MARK: (rows, columns)}
        numpyro.sample("Y", dist.Normal(f, noise[columns]), obs=Y, infer=mark)


def choice_model(A, B, Y=None):
    """Discrete sites choose the design."""
    z = numpyro.sample("z", dist.Bernoulli(0.7))
    with numpyro.plate("row", len(A)):
        group = numpyro.sample("group", dist.Bernoulli(0.5))
    w, v = (truth.weights(2, 0.4, 1.5, name, plate=f"{name}_feature") for name in "wv")
    with numpyro.plate("obs", len(A)):
        location = z * jnp.where(group > 0, A @ w, B @ v)
        numpyro.sample("Y", dist.Normal(location, 0.5), obs=Y)


def beside_nuts(model, *blocks):
    """NUTS with a fixed step size for all other sites."""
    nuts = NUTS(
        model, step_size=0.4, adapt_step_size=False, adapt_mass_matrix=False, max_tree_depth=3
    )
    return Gibbs([*blocks, (nuts, None)])


# Geweke's test


class Joint(NamedTuple):
    """A model, its arguments without the data, a kernel, whether entries are observed, sites that
    NUTS draws, and numbers of replicates, fewer where they cannot run side by side, and steps."""

    model: Any
    args: tuple
    kernel: Any
    observed: Any = True
    unconstrained: tuple[str, ...] = ()
    size: int = 20_000
    num_steps: int = 5


DESIGN = truth.design("correlated", num_obs=4, size=4)
DESIGN[:, 1] = DESIGN[:, 0]
ROWS, COLUMNS = np.array([0, 0, 1, 1, 2, 3, 3, 3, 4, 4]), np.array([0, 1, 0, 2, 1, 0, 1, 2, 2, 1])


def columns(groups=None, collapsed=True):
    model = partial(columns_model, groups=groups)
    return Joint(model, (jnp.asarray(DESIGN),), nss.PairedGibbs(model, collapsed=collapsed))


def scales():
    args = jnp.asarray(DESIGN), jnp.array([0.0, 0.5, 1.0, -1.0])
    # in a batch all wait for the longest search for a slice
    return Joint(scales_model, args, nss.PairedGibbs(scales_model), size=5000)


def latent_design():
    model, (t, centres, _) = truth.latent_design_model, truth.latent_design_case().args
    kernel = beside_nuts(model, (nss.PairedGibbs(model), nss.paired_sites))
    return Joint(model, (t[::5], centres), kernel, unconstrained=("width", "sigma"))


def kinship():
    model, kernel = joint_noise.kinship_model, nss.PairedGibbs(joint_noise.kinship_model)
    args = jnp.asarray(DESIGN), jnp.asarray(joint_noise.KINSHIP[:4, :4])
    kernel = beside_nuts(model, (kernel, nss.paired_sites))
    return Joint(model, args, kernel, unconstrained=("relatives", "alone"))


def chosen_design():
    pairs, model = nss.PairedGibbs(choice_model), choice_model
    kernel = Gibbs([(pairs, nss.paired_sites), (DiscreteGibbs(model), ["z", "group"])])
    return Joint(model, (DESIGN[:, 1:3], DESIGN[:, 2:]), kernel)


def two_blocks():
    model, (X, Z, _) = truth.two_model, truth.two_case().args
    own = [[f"{name}_spike", f"{name}_slab"] for name in "wv"]
    kernel = Gibbs([(nss.PairedGibbs(model), names) for names in own])
    return Joint(model, (X[:4], Z[:4]), kernel)


def tasks(case, model, size=6):
    *args, observed, _ = case.args
    args = [x[:size] for x in (*args, observed)]
    return Joint(model, tuple(args), nss.PairedGibbs(model), observed[:size])


def shared_tasks():
    phi = jnp.asarray(truth.design("correlated", num_obs=4, size=2))
    return Joint(truth.latent_tasks_model, (phi,), nss.PairedGibbs(truth.latent_tasks_model))


def entries(num_blocks):
    kernel = nss.LatentGibbs(entries_model, accelerate=0.25)
    if num_blocks == 2:
        own = ["phi", "noise", "inclusion", "slab_scale"]
        pairs = nss.PairedGibbs(entries_model), nss.paired_sites
        kernel = Gibbs([pairs, (nss.LatentGibbs(entries_model), own)])
    return Joint(entries_model, (ROWS, COLUMNS), kernel, size=5000)


def functions(number=2, num_blocks=1):
    # little noise, so that functions and weights depend on each other
    model = whole_model(number, 0.2 if number == 3 else 1.0)
    numbers, kernel = ("noise", "slab_scale", "inclusion"), nss.LatentGibbs(model, accelerate=0.25)
    if num_blocks == 2:
        pairs = nss.PairedGibbs(model), nss.paired_sites
        kernel = Gibbs([pairs, (nss.LatentGibbs(model), ["phi", "phi_scale", *numbers])])
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    if num_blocks == 3:
        kernel = composite(model, step_size=0.4, max_tree_depth=3, **fixed)
    free = numbers if num_blocks == 3 else ()
    steps = 8 if number == 3 else 4
    return Joint(model, (jnp.asarray(INPUTS),), kernel, SEEN, free, 5000, steps)


def buffet():
    """White functions, which move with noise scales where one task or none uses them."""
    priors = {"noise": dist.HalfNormal(1.0), "slab_scale": dist.HalfNormal(1.5)}
    concentration = dist.Gamma(2.0, 1.0)
    model = nss.models.mtmkl(["white"] * 4, num_tasks=3, buffet=concentration, priors=priors)
    return Joint(model, (jnp.arange(4),), nss.LatentGibbs(model), SEEN[:4], (), 1500)


JOINTS = {
    "columns": columns,
    "columns without moves": partial(columns, collapsed=False),
    "scales of noise": scales,
    "groups": partial(columns, groups=(1, 0, 1)),
    "latent design": latent_design,
    "kinship beside NUTS": kinship,
    "design that discrete sites choose": chosen_design,
    "two blocks of weights": two_blocks,
    "tasks": shared_tasks,
    "masked tasks": lambda: tasks(truth.shared_features_case(), truth.shared_features_model),
    "coefficients of tasks": lambda: tasks(truth.covariates_case(), truth.covariates_model),
    "buffet": buffet,
}
MINUTES = {
    "entries": partial(entries, 1),
    "entries in two blocks": partial(entries, 2),
    "functions": functions,
    "three functions": partial(functions, 3),
    "functions in two blocks": partial(functions, 2, 2),
    "functions in three blocks": partial(functions, 2, 3),
}


def parameters(joints, longer):
    """Make parameters of two dictionaries, of which the second is for releases."""
    marked = [pytest.param(x, id=k, marks=pytest.mark.exhaustive) for k, x in longer.items()]
    return [*(pytest.param(x, id=name) for name, x in joints.items()), *marked]


def data_site(trace):
    return next(x for k, x in trace.items() if k in ("y", "Y"))


def draw(joint, key):
    """Draw all latent sites and the data from the joint density."""
    trace = handlers.trace(handlers.seed(joint.model, key)).get_trace(*joint.args)
    data = data_site(trace)
    latent = {
        k: x["value"]
        for k, x in trace.items()
        if x["type"] == "sample" and not x["is_observed"] and x is not data
    }
    start = {
        k: biject_to(trace[k]["fn"].support).inv(x) if k in joint.unconstrained else x
        for k, x in latent.items()
    }
    return latent, start, data["value"]


def steps(joint, key, start, Y):
    """Where some steps of the kernel end."""
    args = *joint.args, jnp.where(joint.observed, Y, jnp.nan)
    state = joint.kernel.init(key, 0, start, args, {})
    sample = lambda _, state: joint.kernel.sample(state, args, {})  # noqa: E731
    state = jax.lax.fori_loop(0, joint.num_steps, sample, state)
    return joint.kernel.postprocess_fn(args, {})(state.z)


def moments_of(fn):
    """Mean and variance, also of the numbers of classes in order, which have none in NumPyro."""
    if not isinstance(fn, dist.CategoricalProbs):
        return fn.mean, fn.variance
    numbers = jnp.arange(fn.probs.shape[-1])
    mean = fn.probs @ numbers
    variance = jnp.sum(fn.probs * (numbers - mean[..., None]) ** 2, axis=-1)
    # one class may be certain, to rounding
    return mean, variance + 1e-6


def statistics(joint, latent, Y):
    """Sites and residuals, and their products: up to logarithms, all first and second moments."""
    model = handlers.seed(handlers.substitute(joint.model, latent), random.key(0))
    trace = handlers.trace(model).get_trace(*joint.args)
    fn = data_site(trace)["fn"]
    mean, variance = moments_of(fn)
    mean, scale = (jnp.broadcast_to(x, Y.shape) for x in (mean, jnp.sqrt(variance)))
    weights = [x["value"] for k, x in trace.items() if k in ("w", "v", "W")]
    sites = jnp.concatenate([jnp.ravel(x) for x in (*latent.values(), *weights)])
    sites = jnp.concatenate([jnp.arcsinh(sites), jnp.log(jnp.ravel(scale)[:1])])
    each = jnp.arcsinh(mean), jnp.log(jnp.abs(Y - mean) + 1e-3), jnp.arcsinh(Y)
    observed = np.flatnonzero(np.broadcast_to(joint.observed, Y.shape))
    every = jnp.concatenate([sites, *(jnp.ravel(x)[observed] for x in each)])
    data = each[0] * each[2], jnp.square((Y - mean) / scale)
    data = jnp.concatenate([jnp.ravel(x)[observed] for x in data])
    return jnp.concatenate([every, data, jnp.ravel(sites[:, None] * every)])


def changes_of_the_joint(joint):
    """Parameters from the prior, data given those, then a few steps: the joint distribution of
    parameters and data must not change (Geweke 2004, with independent replicates as in Gandy and
    Scott 2020).

    :return: absolute z-scores of the statistics, and their bound.
    """
    keys = random.split(KEY, (2, joint.size))
    latent, start, Y = jax.jit(jax.vmap(partial(draw, joint)))(keys[0])
    run = partial(steps, joint)
    # vmap computes both branches of a condition
    side_by_side = joint.size == 20_000
    each = jax.vmap(run) if side_by_side else lambda *x: jax.lax.map(lambda y: run(*y), x)
    values = jax.jit(each)(keys[1], start, Y)
    new = {name: values[name] for name in latent}

    moved = {k: np.asarray(x != new[k]) for k, x in latent.items()}
    assert all(np.mean(x) > 0.03 for x in moved.values()), {k: np.mean(x) for k, x in moved.items()}
    # what is tested is not the start
    for name, x in latent.items():
        if jnp.issubdtype(x.dtype, jnp.inexact):
            assert np.corrcoef(np.ravel(x), np.ravel(new[name]))[0, 1] < 0.98, name

    compare = jax.jit(jax.vmap(partial(statistics, joint)))
    difference = np.asarray(compare(new, Y) - compare(latent, Y))
    error = np.std(difference, axis=0) / np.sqrt(joint.size)
    z = np.abs(np.mean(difference, axis=0)) / np.where(error > 0, error, 1)
    # a false alarm in 1 of 1000 keys
    return z, stats.norm.isf(1e-3 / 2 / z.size)


@pytest.mark.parametrize("make", parameters(JOINTS, MINUTES))
def test_steps_keep_the_joint(make, x64, monkeypatch):
    # fewer weights in a block than tasks
    monkeypatch.setattr(weights_of_function, "NUM_TASKS", 2)
    z, bound = changes_of_the_joint(make())
    assert np.all(np.isfinite(z)) and np.max(z) < bound


# The posterior of all models


def agrees(draws, expected, within=np.inf):
    """Whether means of draws (chain, draw, ...) are within 4 standard errors of what they should.

    A false alarm in 1 of 16000 comparisons.
    """
    draws = np.asarray(draws, float)
    mean, sd = draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))
    # a feature that is never in has a standard error that no draw tells; it is below this
    floor = 4.0 / draws[..., 0].size
    error = sd / np.sqrt(effective_sample_size(draws)) if np.all(sd > 0) else sd
    error = np.where(sd > 0, np.nan_to_num(error), 0.0)
    difference = np.abs(mean - expected)
    return bool(np.all(difference < 4.0 * error + floor) and np.all(difference < within))


def check_posterior(mcmc, case, exact):
    """20 to 60 comparisons: a false alarm in 1 of 270 keys or fewer."""
    draws = mcmc.get_samples(group_by_chain=True)
    spikes, slabs, w = (case.joined(draws, key, 2) for key in ("{}_spike", "{}_slab", "{}"))
    np.testing.assert_array_equal(w, np.where(spikes > 0, slabs, 0.0))
    assert agrees(spikes, exact.inclusion, 0.03)
    assert agrees(w, exact.mean)
    assert agrees(w**2, np.diag(exact.second_moments))
    assert agrees(slabs, exact.probs @ exact.locs)
    probs = mcmc.get_extra_fields(group_by_chain=True)["inclusion_probabilities"]
    probs = case.joined(probs, "{}", 2)
    assert agrees(probs, exact.inclusion, 0.03)
    assert np.all(probs.var(axis=(0, 1)) <= spikes.var(axis=(0, 1)) + 1e-6)


def sampled(kernel, args, num_samples=10_000, **options):
    options = {"num_warmup": 100, "chain_method": "vectorized", "progress_bar": False} | options
    mcmc = MCMC(kernel, num_samples=num_samples, num_chains=2, **options)
    mcmc.run(KEY, *args, extra_fields=("inclusion_probabilities",))
    return mcmc


CASES = truth.CASES | joint_noise.CASES
# what is in no model of Geweke's test
ALONE = [
    "params",
    "offset, mask, counts and scales",
    "latent scale of each observation",
    "one latent inclusion of two",
    "tasks",
    "generalised least squares",
    "autoregressive errors",
    "summary statistics",
]


@cache
def kernel_for_all_designs():
    return nss.PairedGibbs(truth.fixed_model)


@pytest.mark.parametrize("design", truth.DESIGNS)
def test_draws_have_the_posterior_of_every_design(design):
    case = truth.fixed_case(design)
    mcmc = sampled(kernel_for_all_designs(), case.args, jit_model_args=True)
    check_posterior(mcmc, case, truth.enumerate_models(case.regression({})))


@pytest.mark.parametrize("name", ALONE)
def test_draws_have_the_posterior_of_all_models(name):
    """Given the other sites, at the means of their priors; Geweke's test has the draws of these."""
    case = CASES[name]()
    trace = handlers.trace(handlers.seed(case.model, KEY)).get_trace(*case.args)
    pairs = {key.format(k) for k in case.shapes for key in ("{}_spike", "{}_slab")}
    values = {k: x["value"] for k, x in trace.items() if x["type"] == "param"}
    for k, x in trace.items():
        if x["type"] == "sample" and k not in pairs and not x["is_observed"]:
            values[k] = jnp.broadcast_to(x["fn"].mean, jnp.shape(x["value"]))
    model = handlers.condition(case.model, values)
    exact = truth.enumerate_models(case.regression({k: np.asarray(x) for k, x in values.items()}))
    check_posterior(sampled(nss.PairedGibbs(model), case.args), case, exact)
