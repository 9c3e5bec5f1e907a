# SPDX-License-Identifier: Apache-2.0
"""PairedGibbs as a kernel of MCMC and as a block of Gibbs: starts, states, data, refusals."""

from functools import partial
from pathlib import Path
import pickle
import subprocess
import sys

import numpy as np
import pytest
from refusals import refusals
from scipy import stats
from tinygp import kernels
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs

import numpyro_spikeslab as nss

KEY = random.key(0)


def mcmc_of(kernel, num_samples=20, **options):
    return MCMC(kernel, num_warmup=20, num_samples=num_samples, progress_bar=False, **options)


def composite(model):
    """The pairs, and the rest by NUTS."""
    return Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])


# Chains


def test_one_kernel_runs_different_numbers_of_parallel_chains():
    """A model traced for the devices of three chains is another program than for those of two."""
    script = str(Path(__file__).parent / "in_parallel.py")
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 chains\n2 chains\n"


@pytest.mark.parametrize("beside", [False, True])
def test_a_chain_goes_on_where_it_stopped_and_from_a_pickle(beside):
    case = truth.noise_case() if beside else truth.fixed_case()
    make = composite if beside else nss.PairedGibbs
    long, mcmc = mcmc_of(make(case.model), 60), mcmc_of(make(case.model), 30)
    long.sampler = pickle.loads(pickle.dumps(long.sampler))
    long.run(KEY, *case.args)
    mcmc.run(KEY, *case.args)
    halves = [mcmc.get_samples()["w"]]
    mcmc = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(mcmc.get_samples()["w"], halves[0])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *case.args)
    halves.append(mcmc.get_samples()["w"])
    np.testing.assert_allclose(np.concatenate(halves), long.get_samples()["w"], atol=1e-5)


@pytest.mark.parametrize("jit_model_args", [False, True])
def test_a_sampler_that_runs_again_uses_the_new_data(jit_model_args):
    case = truth.shared_features_case()
    *args, Y = case.args
    mcmc = mcmc_of(nss.PairedGibbs(case.model), jit_model_args=jit_model_args)
    for data in (Y, 2.0 - Y):
        mcmc.run(KEY, *args, data)
        fresh = mcmc_of(nss.PairedGibbs(case.model))
        fresh.run(KEY, *args, data)
        for name, draws in fresh.get_samples().items():
            np.testing.assert_allclose(mcmc.get_samples()[name], draws, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit_model_args", [False, True])
def test_params_of_the_model_are_those_of_the_call(x64, jit_model_args):
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = X[:, 0] + 5.0

    def model(start):
        offset = numpyro.param("offset", start)
        numpyro.deterministic("level", offset + jnp.zeros(()))
        truth.respond(y, offset + X @ truth.weights(3), 0.5)

    kernel = nss.PairedGibbs(model)
    for start in (jnp.array(0.0), jnp.array(5.0)):
        mcmc = mcmc_of(kernel, 200, jit_model_args=jit_model_args)
        mcmc.run(KEY, start)
        draws = mcmc.get_samples()
        assert np.all(draws["level"] == start)
    # the exact value is 1.00, and the standard deviation of the mean of the draws 0.006
    assert np.mean(draws["w"], axis=0)[0] == pytest.approx(1.0, abs=0.1)


def test_a_chain_may_start_in_a_compiled_function():
    X = np.random.default_rng(0).normal(size=(30, 3))

    def model():
        logits = X @ truth.weights(3)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=1 * (X[:, 0] > 0))

    kernel = nss.PairedGibbs(model)
    inits = kernel.init, jax.jit(kernel.init, static_argnums=1)
    states = [init(KEY, 100, None, (), {}) for init in inits]
    for one, other in zip(*(jax.tree.leaves(x.adapt_state) for x in states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-13, 0.0])
def test_a_chain_stays_finite(x64, size):
    """Where a column determines the response, as of a simulation, from a start far away."""
    X = random.normal(KEY, (30, 4))
    kernel, args = nss.PairedGibbs(truth.noise_model), (X, size * X[:, 0])
    start = {"sigma": 1.0, "w_slab": jnp.full(4, 1e200), "w_spike": jnp.ones(4, int)}
    state = kernel.init(KEY, 0, start, args, {})

    def step(state, _):
        state = kernel.sample(state, args, {})
        return state, state.z

    draws = jax.jit(lambda state: jax.lax.scan(step, state, length=300)[1])(state)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    np.testing.assert_allclose((draws["w_spike"] * draws["w_slab"])[200:, 0], size, atol=1e-3)
    assert np.all(draws["sigma"] > 0) and np.all(draws["sigma"][200:] < 1e-3)


# Starts and states


def test_chains_start_where_they_are_told():
    case = truth.noise_case()
    kernel, both = nss.PairedGibbs(case.model), composite(case.model)
    spikes, slabs = np.array([[1, 0, 1, 1], [0, 0, 1, 0]]), np.ones((2, 4)) * [[2], [3]]
    for block, key, start in (
        (kernel, random.split(KEY), {"w_spike": spikes, "w_slab": slabs}),
        (both, KEY, {"w_spike": spikes[0], "w_slab": slabs[0]}),
        (kernel, KEY, {"w_slab": slabs[0]}),
    ):
        z = block.init(key, 0, start, case.args, {}).z
        for name, x in start.items():
            np.testing.assert_array_equal(z[name], x)
    assert z["w_spike"].shape == (4,)


def test_without_a_start_chains_begin_at_the_prior():
    case = truth.fixed_case()
    kernel = nss.PairedGibbs(case.model)
    state = kernel.init(random.split(KEY, 2000), 0, None, case.args, {})
    # eight tests at 1e-4 each: a false alarm in 1 of 1250 keys
    for m in range(4):
        assert stats.kstest(state.z["w_slab"][:, m], stats.norm(0.0, 0.8).cdf).pvalue > 1e-4
        count = int(np.sum(state.z["w_spike"][:, m]))
        assert stats.binomtest(count, 2000, 0.3).pvalue > 1e-4


@pytest.mark.parametrize("name", ["fixed", "noise", "functions"])
def test_a_step_leaves_the_types_of_a_state(name, precision):
    """Or else MCMC compiles its second step anew."""
    if name == "functions":
        args = (jnp.arange(6.0), jnp.ones((6, 2)).at[0].set(0.0))
        kernel = nss.LatentGibbs(nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2), accelerate=0.25)
    else:
        case = {"fixed": truth.fixed_case, "noise": truth.noise_case}[name]()
        args = case.args
        kernel = nss.PairedGibbs(case.model) if name == "fixed" else composite(case.model)
    state = kernel.init(KEY, 10, None, args, {})
    after = jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert x == jax.eval_shape(lambda y: y, y)


def test_other_sites_may_have_names_of_pairs():
    def model(X, y):
        pi = numpyro.sample("prior_spike", dist.Beta(1.0, 1.0))
        scale = numpyro.sample("prior_slab", dist.HalfNormal(1.0))
        truth.respond(y, X @ truth.weights(4, pi, scale), 0.3)

    state = nss.PairedGibbs(model).init(KEY, 0, None, truth.fixed_case().args, {})
    assert set(state.inclusion_probabilities) == {"w"}


# Refusals


def grouped_model(X, group, y=None):
    with numpyro.plate("group", 2):
        inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    truth.respond(y, X @ truth.weights(X.shape[1], inclusion[group]), 0.5)


def improper_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
    truth.respond(y, X @ truth.weights(X.shape[1]), sigma)


def init(model, start=None, args=None, key=KEY):
    args = truth.fixed_case().args if args is None else args
    return nss.PairedGibbs(model).init(key, 0, start, args, {})


def groups_of_rows(X, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("group", 3):
        effect = tau * numpyro.sample("effect", dist.Normal(0.0, 1.0))
    truth.respond(y, effect[np.arange(len(X)) % 3] + X @ truth.weights(X.shape[1]), 0.5)


def start_at(**start):
    return partial(init, truth.fixed_model, start)


def run_traced():
    X, y = truth.fixed_case().args
    mcmc_of(nss.PairedGibbs(grouped_model), jit_model_args=True).run(KEY, X, np.arange(4) % 2, y)


REFUSALS = {
    "other sites": (
        partial(init, truth.scaled_model),
        r"latent sites \['sigma'\].*Gibbs\(\[\(PairedGibbs\(model\), \['w_spike', 'w_slab'\]\)",
    ),
    "improper prior": (partial(init, improper_model), "the prior of 'sigma' is improper"),
    "no site": (start_at(sigma=1.0), r"init_params\['sigma'\]: got an unknown name"),
    "shape": (
        start_at(w_slab=np.ones((3, 4))),
        r"init_params\['w_slab'\]: got shape \(3, 4\), expected \(4,\)",
    ),
    "one start for two chains": (
        partial(start_at(w_slab=np.ones(4)), key=random.split(KEY, 2)),
        r"init_params\['w_slab'\]: got shape \(4,\), expected \(2, 4\)",
    ),
    "not finite": (
        start_at(w_slab=np.array([1.0, 1.0, 1.0, np.nan])),
        r"init_params\['w_slab'\]: got .*nan.*, expected values in Real",
    ),
    "out of the support": (
        start_at(w_spike=np.array([0, 1, 2, 0])),
        r"init_params\['w_spike'\]: got \[0 1 2 0\], expected values in Boolean",
    ),
    "negative noise": (
        partial(init, truth.hyper_model, {"sigma": np.array(-1.0)}, truth.hyper_case().args),
        r"init_params\['sigma'\]: got -1\.0, expected values in Positive",
    ),
    "negative noise of a chain": (
        partial(
            init,
            truth.hyper_model,
            {"sigma": np.array([1.0, -1.0])},
            truth.hyper_case().args,
            random.split(KEY, 2),
        ),
        r"init_params\['sigma'\]: got \[ 1\. -1\.\], expected values in Positive",
    ),
    "scale times coefficients": (
        partial(init, groups_of_rows),
        r"latent sites \['tau'\].*Gibbs\(\[\(PairedGibbs\(model\), paired_sites\), \(NUTS",
    ),
    "traced": (run_traced, r"`jit_model_args=True`.*sites \['inclusion'\] depend.*partial"),
}


test_what_does_not_fit_is_named = refusals(REFUSALS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("continuous", [False, True])
def test_the_blocks_that_an_error_suggests_sample_the_model(continuous):
    def model(X, y=None):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        t = numpyro.sample("t", dist.Normal()) if continuous else 0.3
        truth.respond(y, X @ truth.weights(X.shape[1]) * (1 + z) + jnp.exp(t), 0.5)

    args = truth.noise_case().args
    with pytest.raises(ValueError, match="other blocks: Gibbs") as caught:
        init(model, args=args)
    own = "(PairedGibbs(model), ['w_spike', 'w_slab']), (DiscreteGibbs(model), ['z'])"
    last = ", (NUTS(model), None)" if continuous else ""
    assert f"Gibbs([{own}{last}])" in str(caught.value)
    blocks = [(nss.PairedGibbs(model), ["w_spike", "w_slab"]), (DiscreteGibbs(model), ["z"])]
    kernel = Gibbs([*blocks, (NUTS(model), None)] if continuous else blocks)
    mcmc = mcmc_of(kernel, 5)
    mcmc.run(KEY, *args)
    assert np.all(np.isfinite(mcmc.get_samples()["w"]))
