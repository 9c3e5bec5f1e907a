# SPDX-License-Identifier: Apache-2.0
"""PairedGibbs, alone and in a composite, against exact posteriors."""

from functools import cache
from pathlib import Path
import pickle
import subprocess
import sys

import arviz_base
import numpy as np
import pytest
from scipy import stats
from tinygp import kernels
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs

import numpyro_spikeslab as nss

KEY = random.key(0)
RAO_BLACKWELL = "inclusion_probabilities.w"
COMPOSITE_RAO_BLACKWELL = "block_states.0.inclusion_probabilities.w"


def alone(case, num_samples=6000, num_chains=2, chain_method="vectorized", **options):
    """A sampler of the pairs."""
    return MCMC(
        nss.PairedGibbs(case.model),
        num_warmup=100,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
        **options,
    )


def composite(case, chain_method="sequential", **options):
    """A sampler of the pairs and, by NUTS, of the rest."""
    kernel = Gibbs([(nss.PairedGibbs(case.model), nss.paired_sites), (NUTS(case.model), None)])
    return MCMC(
        kernel,
        num_warmup=300,
        num_samples=5000,
        num_chains=2,
        chain_method=chain_method,
        progress_bar=False,
        **options,
    )


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


def check_posterior(mcmc, case, exact, within=0.02):
    draws = mcmc.get_samples(group_by_chain=True)
    spikes, slabs, w = (case.joined(draws, key, 2) for key in ("{}_spike", "{}_slab", "{}"))
    np.testing.assert_array_equal(w, np.where(spikes > 0, slabs, 0.0))
    assert agrees(spikes, exact.inclusion, within)
    assert agrees(w, exact.mean)
    if isinstance(exact, truth.Posterior):
        assert agrees(w**2, np.diag(exact.second_moments))
        assert agrees(slabs, exact.probs @ exact.locs)


# Alone


@cache
def one_sampler_for_all_designs():
    return alone(truth.fixed_case(), jit_model_args=True, num_samples=10_000)


@pytest.mark.parametrize("design", truth.DESIGNS)
def test_the_posterior_of_every_design_is_exact(design):
    case = truth.fixed_case(design)
    exact = truth.enumerate_models(case.regression({}))
    mcmc = one_sampler_for_all_designs()
    mcmc.run(KEY, *case.args, extra_fields=(RAO_BLACKWELL,))
    # 20 comparisons: a false alarm in 1 of 800 keys
    check_posterior(mcmc, case, exact)
    spikes = np.asarray(mcmc.get_samples(group_by_chain=True)["w_spike"], float)
    probs = np.asarray(mcmc.get_extra_fields(group_by_chain=True)[RAO_BLACKWELL], float)
    assert agrees(probs, exact.inclusion, within=0.02)
    assert np.all(probs.var(axis=(0, 1)) < spikes.var(axis=(0, 1)))


@cache
def run_of(name):
    case = truth.CASES[name]()
    mcmc = alone(case)
    mcmc.run(KEY, *case.args)
    return case, mcmc


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["offset, mask, counts and scales", "two sets of weights", "tasks", "params"],
)
def test_the_posterior_of_every_model_is_exact(name):
    case, mcmc = run_of(name)
    # a model's params stay where they start
    start = {"sigma": 1.0, "slab_scale": 1.0, "inclusion": 0.5}
    # 20 comparisons: a false alarm in 1 of 800 keys
    check_posterior(mcmc, case, truth.enumerate_models(case.regression(start)))


@pytest.mark.exhaustive
def test_chain_methods_give_the_same_chains():
    case = truth.fixed_case()
    start = posterior_draws(case, 2)
    chains = []
    for method in ("sequential", "vectorized", jax.vmap):
        mcmc = alone(case, 50, num_chains=2, chain_method=method)
        mcmc.run(KEY, *case.args, init_params=start)
        chains.append(mcmc.get_samples(group_by_chain=True))
        assert chains[-1]["w"].shape == (2, 50, 4)
        assert not np.array_equal(chains[-1]["w"][0], chains[-1]["w"][1])
    for other in chains[1:]:
        assert set(other) == set(chains[0])
        for k, x in chains[0].items():
            np.testing.assert_allclose(other[k], x, atol=1e-5)


@pytest.mark.slow
def test_one_kernel_runs_different_numbers_of_parallel_chains():
    """A model that is traced for the devices of three chains is no model for those of two."""
    script = str(Path(__file__).parent / "in_parallel.py")
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 chains\n2 chains\n"


@pytest.mark.slow
def test_typed_and_legacy_keys_give_the_same_chain():
    case = truth.fixed_case()
    mcmc = one_sampler_for_all_designs()
    draws = []
    for key in (random.key(3), random.PRNGKey(3)):
        mcmc.run(key, *case.args)
        draws.append(mcmc.get_samples()["w"])
    np.testing.assert_array_equal(*draws)


@pytest.mark.exhaustive
def test_a_sampler_that_runs_again_uses_the_new_data():
    case = truth.fixed_case()
    X, y = case.args
    mcmc = alone(case, 4000)
    mcmc.run(KEY, X, y)
    first = mcmc.get_samples()["w"]
    new = truth.regression(X, 2.0 - y, 0.5, 0.3, 0.8)
    mcmc.run(KEY, X, 2.0 - y)
    check_posterior(mcmc, case, truth.enumerate_models(new))
    mcmc.run(KEY, X, y)
    np.testing.assert_array_equal(mcmc.get_samples()["w"], first)


@pytest.mark.slow
def test_a_chain_goes_on_where_it_stopped():
    case = truth.fixed_case()
    long = alone(case, 60, num_chains=1)
    # a kernel pickles before it is used and after
    long.sampler = pickle.loads(pickle.dumps(long.sampler))
    long.run(KEY, *case.args)
    mcmc = alone(case, 30, num_chains=1)
    mcmc.run(KEY, *case.args)
    halves = [mcmc.get_samples()["w"]]
    mcmc = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(mcmc.get_samples()["w"], halves[0])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *case.args)
    halves.append(mcmc.get_samples()["w"])
    np.testing.assert_allclose(np.concatenate(halves), long.get_samples()["w"], atol=1e-5)


def posterior_draws(case, num_chains):
    """Draws of the pairs from a fitted guide."""
    guide = nss.PairedGuide(case.model)
    result = nss.CAVI(case.model, guide).run(KEY, 100, *case.args, progress_bar=False)
    draws = guide.sample_posterior(KEY, result.params, *case.args, sample_shape=(num_chains,))
    return {k: x for k, x in draws.items() if k in ("w_spike", "w_slab")}


@pytest.mark.slow
def test_chains_start_at_draws_from_a_guide():
    case = truth.fixed_case()
    start = posterior_draws(case, 3)
    kernel = nss.PairedGibbs(case.model)
    state = kernel.init(random.split(KEY, 3), 0, start, case.args, {})
    assert state.z.keys() == start.keys()
    for k, x in start.items():
        np.testing.assert_array_equal(state.z[k], x)
    one = {k: x[0] for k, x in start.items()}
    state = kernel.init(KEY, 0, {"w_slab": one["w_slab"]}, case.args, {})
    np.testing.assert_array_equal(state.z["w_slab"], one["w_slab"])
    assert state.z["w_spike"].shape == (4,)
    with pytest.raises(ValueError, match=r"init_params\['sigma'\]: got a name"):
        kernel.init(KEY, 0, one | {"sigma": 1.0}, case.args, {})
    with pytest.raises(ValueError, match=r"w_slab'\]: got shape \(3, 4\), expected \(4,\)"):
        kernel.init(KEY, 0, start, case.args, {})


def test_without_a_start_chains_begin_at_the_prior():
    case = truth.fixed_case()
    kernel = nss.PairedGibbs(case.model)
    state = kernel.init(random.split(KEY, 2000), 0, None, case.args, {})
    # eight tests at 1e-4 each: a false alarm in 1 of 1250 keys
    for m in range(4):
        assert stats.kstest(state.z["w_slab"][:, m], stats.norm(0.0, 0.8).cdf).pvalue > 1e-4
        count = int(np.sum(state.z["w_spike"][:, m]))
        assert stats.binomtest(count, 2000, 0.3).pvalue > 1e-4


def types(state):
    """Of all arrays, with whether they are weak."""
    leaves, structure = jax.tree.flatten(state)
    return structure, [jax.eval_shape(lambda x: x, leaf) for leaf in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "noise", "functions"])
def test_a_step_leaves_the_types_of_a_state(name, precision):
    """Or else MCMC compiles its second step anew."""
    if name == "functions":
        args = (jnp.arange(6.0), jnp.ones((6, 2)).at[0].set(0.0))
        kernel = nss.mtmkl_kernel(nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2))
    else:
        case = {"fixed": truth.fixed_case, "noise": truth.noise_case}[name]()
        args = case.args
        kernel = nss.PairedGibbs(case.model) if name == "fixed" else composite(case).sampler
    state = kernel.init(KEY, 10, None, args, {})
    after = jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)
    assert types(after) == types(state)


def test_other_latent_sites_need_a_block_of_their_own():
    case = truth.scaled_case()
    mcmc = alone(case, 10)
    message = (
        r"latent sites \['sigma'\].*Gibbs\(\[\(PairedGibbs\(model\), \['w_spike', 'w_slab'\]\)"
    )
    with pytest.raises(ValueError, match=message):
        mcmc.run(KEY, *case.args)


@pytest.mark.exhaustive
@pytest.mark.parametrize("continuous", [False, True])
def test_the_blocks_that_an_error_suggests_sample_the_model(continuous):
    def model(X, y=None):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        t = numpyro.sample("t", dist.Normal()) if continuous else 0.3
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        numpyro.sample("y", dist.Normal(X @ w * (1 + z) + jnp.exp(t), 0.5).to_event(1), obs=y)

    args = truth.noise_case().args
    with pytest.raises(ValueError, match="other blocks: Gibbs") as caught:
        nss.PairedGibbs(model).init(KEY, 0, None, args, {})
    own = "(PairedGibbs(model), ['w_spike', 'w_slab']), (DiscreteGibbs(model), ['z'])"
    rest = ", (NUTS(model), None)" if continuous else ""
    assert f"Gibbs([{own}{rest}])" in str(caught.value)
    blocks = [(nss.PairedGibbs(model), ["w_spike", "w_slab"]), (DiscreteGibbs(model), ["z"])]
    kernel = Gibbs([*blocks, (NUTS(model), None)] if continuous else blocks)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(KEY, *args)
    assert np.all(np.isfinite(mcmc.get_samples()["w"]))


def test_other_sites_may_have_names_of_pairs():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 3))
    y = X[:, 0] + 0.3 * rng.normal(size=20)

    def model(X, y):
        pi = numpyro.sample("prior_spike", dist.Beta(1.0, 1.0))
        scale = numpyro.sample("prior_slab", dist.HalfNormal(1.0))
        with numpyro.plate("feature", 3):
            w = nss.spike_slab("w", pi, scale)
        numpyro.sample("y", dist.Normal(X @ w, 0.3), obs=y)

    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(random.key(0), X, y, extra_fields=("inclusion_probabilities",))
    assert set(mcmc.get_extra_fields()["inclusion_probabilities"]) == {"w"}


def test_an_improper_prior_needs_a_block_of_its_own():
    def model(X, y=None):
        positive = dist.constraints.positive
        sigma = numpyro.sample("sigma", dist.ImproperUniform(positive, (), ()))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        numpyro.sample("y", dist.Normal(X @ w, sigma).to_event(1), obs=y)

    kernel = nss.PairedGibbs(model)
    with pytest.raises(ValueError, match="PairedGibbs: the prior of 'sigma' is improper"):
        kernel.init(KEY, 0, None, truth.noise_case().args, {})


@pytest.mark.slow
def test_arviz_labels_the_draws():
    _, mcmc = run_of("two sets of weights")
    data = arviz_base.from_numpyro(mcmc, coords={"x": ["a", "b", "c"]})
    posterior = data["posterior"]
    assert posterior["w"].dims == posterior["w_spike"].dims == ("chain", "draw", "x")
    assert posterior["v_slab"].dims == ("chain", "draw", "z")
    assert posterior["x"].values.tolist() == ["a", "b", "c"]
    assert posterior.sizes["chain"] == 2 and posterior.sizes["draw"] == 6000


# Traced data


def short(model, *args, **options):
    kernel = nss.PairedGibbs(model)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=20, progress_bar=False, **options)
    mcmc.run(KEY, *args)
    return mcmc.get_samples()


@pytest.mark.parametrize("jit_model_args", [False, True])
def test_params_of_the_model_are_those_of_the_call(x64, jit_model_args):
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = X[:, 0] + 5.0

    def model(start):
        offset = numpyro.param("offset", start)
        with numpyro.plate("feature", 3):
            w = nss.spike_slab("w", 0.3)
        numpyro.deterministic("level", offset + jnp.zeros(()))
        with numpyro.plate("obs", 40):
            numpyro.sample("y", dist.Normal(offset + X @ w, 0.5), obs=y)

    kernel = nss.PairedGibbs(model)
    for start in (jnp.array(0.0), jnp.array(5.0)):
        mcmc = MCMC(
            kernel,
            num_warmup=20,
            num_samples=200,
            progress_bar=False,
            jit_model_args=jit_model_args,
        )
        mcmc.run(KEY, start)
        draws = mcmc.get_samples()
        assert np.all(draws["level"] == start)
    # Where the offset is right nothing else is left. The exact values are 0.08, 0.04 and 1.00, and
    # the draws' standard deviations 0.02, 0.02 and 0.006: one in a million fails.
    assert np.all(np.mean(draws["w_spike"], axis=0)[1:] < 0.3)
    assert np.mean(draws["w"], axis=0)[0] == pytest.approx(1.0, abs=0.1)


def test_chains_of_traced_data_are_those_of_the_data(x64):
    case = truth.shared_features_case()
    found = short(case.model, *case.args, jit_model_args=True)
    for name, draws in short(case.model, *case.args).items():
        np.testing.assert_allclose(found[name], draws, rtol=1e-8, err_msg=name)
    assert np.all(np.std(found["sigma"], axis=0) > 0)


def test_sites_that_traced_data_decide_are_refused():
    case = truth.fixed_case()

    def model(X, group, y=None):
        with numpyro.plate("group", 2):
            inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", inclusion[group])
        numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)

    X, y = case.args
    with pytest.raises(
        ValueError, match=r"`jit_model_args=True`.*sites \[.inclusion.\] depend.*partial"
    ):
        short(model, X, np.arange(X.shape[1]) % 2, y, jit_model_args=True)
    assert np.std(short(model, X, np.arange(X.shape[1]) % 2, y)["inclusion"]) > 0


# As a block


@cache
def composite_run():
    """One run of which several tests read; with a legacy key."""
    case = truth.noise_case()
    mcmc = composite(case, jit_model_args=True)
    mcmc.run(random.PRNGKey(1), *case.args, extra_fields=(COMPOSITE_RAO_BLACKWELL,))
    return case, mcmc


def check_composite(mcmc, case, within=0.02):
    exact = truth.integrate_sigma(case)
    # 9 comparisons: a false alarm in 1 of 1700 keys
    check_posterior(mcmc, case, exact, within)
    sigma = mcmc.get_samples(group_by_chain=True)["sigma"][..., None]
    assert agrees(sigma, exact.sigma)


@pytest.mark.slow
def test_the_composite_is_exact():
    case, mcmc = composite_run()
    check_composite(mcmc, case)
    probs = mcmc.get_extra_fields(group_by_chain=True)[COMPOSITE_RAO_BLACKWELL]
    assert agrees(probs, truth.integrate_sigma(case).inclusion, within=0.02)


@pytest.mark.slow
def test_the_composite_is_exact_where_its_design_depends_on_the_other_block():
    case = truth.scaled_case()
    mcmc = composite(case, chain_method=jax.vmap)
    mcmc.run(KEY, *case.args)
    # correlated features take turns, so the standard errors are larger
    check_composite(mcmc, case, within=0.1)


@pytest.mark.slow
def test_noise_is_drawn_exactly_without_another_block():
    case = truth.noise_case()
    mcmc = alone(case)
    mcmc.run(KEY, *case.args)
    check_composite(mcmc, case)


@pytest.mark.slow
def test_the_composite_goes_on_from_a_pickle_and_with_new_data():
    _, mcmc = composite_run()
    copy = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(copy.get_samples()["w"], mcmc.get_samples()["w"])
    # the step size is adapted to the first data, which does not make it wrong for the second
    new = truth.noise_case(seed=5)
    copy.post_warmup_state = copy.last_state
    copy.run(copy.post_warmup_state.rng_key, *new.args)
    check_composite(copy, new)


@pytest.mark.slow
def test_arviz_labels_the_draws_of_a_composite():
    _, mcmc = composite_run()
    data = arviz_base.from_numpyro(mcmc, log_likelihood=True)
    assert data["posterior"]["w"].dims == ("chain", "draw", "feature")
    assert data["posterior"]["sigma"].dims == ("chain", "draw")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "obs")


@pytest.mark.slow
def test_each_block_may_own_one_set_of_weights():
    case = truth.two_case()
    blocks = [
        (nss.PairedGibbs(case.model), [f"{name}_spike", f"{name}_slab"]) for name in ("w", "v")
    ]
    mcmc = MCMC(
        Gibbs(blocks),
        num_warmup=100,
        num_samples=6000,
        num_chains=2,
        chain_method=jax.vmap,
        progress_bar=False,
    )
    mcmc.run(KEY, *case.args, extra_fields=("block_states.1.inclusion_probabilities.v",))
    exact = truth.enumerate_models(case.regression({}))
    # 25 comparisons: a false alarm in 1 of 640 keys
    check_posterior(mcmc, case, exact)
    (probs,) = mcmc.get_extra_fields(group_by_chain=True).values()
    assert agrees(probs, exact.inclusion[3:], within=0.02)


def test_a_composite_starts_at_draws_from_a_guide():
    case = truth.noise_case()
    start = {k: x[0] for k, x in posterior_draws(case, 1).items()}
    kernel = composite(case).sampler
    state = kernel.init(KEY, 0, start, case.args, {})
    for k, x in start.items():
        np.testing.assert_array_equal(state.z[k], x)
    with pytest.raises(ValueError, match=r"unknown sites \['w'\]"):
        kernel.init(KEY, 0, start | {"w": jnp.zeros(4)}, case.args, {})


def tiny_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 0.5))
    inclusion = numpyro.sample("inclusion", dist.Uniform(0.05, 0.95))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, 1.5)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


@pytest.mark.slow
def test_steps_from_an_exact_draw_stay_exact():
    """Parameters from the prior, data given those, then a few steps of the sampler: the joint
    distribution of parameters and data must not change (Geweke 2004, with independent replicates
    as in Gandy and Scott 2020)."""
    size, num_steps = 20_000, 6
    rng = np.random.default_rng(0)
    X = truth.design("correlated", num_obs=4, size=2)
    before = {
        "sigma": np.exp(0.5 * rng.normal(size=size)),
        "inclusion": rng.uniform(0.05, 0.95, size=size),
        "slab": 1.5 * rng.normal(size=(size, 2)),
    }
    before["spike"] = (rng.random((size, 2)) < before["inclusion"][:, None]).astype(int)
    before["w"] = before["spike"] * before["slab"]
    y = before["w"] @ X.T + before["sigma"][:, None] * rng.normal(size=(size, 4))

    nuts = NUTS(
        tiny_model, step_size=0.4, adapt_step_size=False, adapt_mass_matrix=False, max_tree_depth=3
    )
    kernel = Gibbs([(nss.PairedGibbs(tiny_model), nss.paired_sites), (nuts, None)])
    unit = (before["inclusion"] - 0.05) / 0.9
    start = {
        "sigma": np.log(before["sigma"]),
        "inclusion": np.log(unit) - np.log1p(-unit),
        "w_spike": before["spike"],
        "w_slab": before["slab"],
    }

    @jax.jit
    @jax.vmap
    def steps(key, start, y):
        args = (jnp.asarray(X), y)
        state = kernel.init(key, 0, start, args, {})
        step = lambda state, _: (kernel.sample(state, args, {}), None)  # noqa: E731
        state = jax.lax.scan(step, state, length=num_steps)[0]
        return kernel.postprocess_fn(args, {})(state.z)

    out = steps(random.split(KEY, size), jax.tree.map(jnp.asarray, start), jnp.asarray(y))
    after = {k.removeprefix("w_"): np.asarray(x, float) for k, x in out.items()}
    # 27 tests at 1e-4 each: a false alarm in 1 of 370 keys
    level = 1e-4
    # the steps mix: what is tested is not the start
    assert abs(np.corrcoef(before["sigma"], after["sigma"])[0, 1]) < 0.95
    assert np.mean(before["spike"] != after["spike"]) > 0.1
    assert stats.kstest(np.log(after["sigma"]), stats.norm(0.0, 0.5).cdf).pvalue > level
    assert stats.kstest(after["inclusion"], stats.uniform(0.05, 0.9).cdf).pvalue > level
    for m in range(2):
        assert stats.kstest(after["slab"][:, m], stats.norm(0.0, 1.5).cdf).pvalue > level
    # moments of parameters and data together, as paired differences
    for function in (
        lambda z: z["spike"],
        lambda z: z["w"] ** 2,
        lambda z: z["w"] * (y @ X),
        lambda z: z["spike"] * np.square(y @ X),
        lambda z: z["spike"] * z["inclusion"][:, None],
        lambda z: z["spike"] * np.log(z["sigma"])[:, None],
        lambda z: z["spike"][:, :1] * z["spike"][:, 1:],
        lambda z: z["w"][:, :1] * z["w"][:, 1:],
        lambda z: np.log(z["sigma"]) * np.log(np.sum(y**2, axis=1)),
        lambda z: z["inclusion"] * np.log(np.sum(y**2, axis=1)),
        lambda z: z["inclusion"] * np.log(z["sigma"]),
        lambda z: np.sum((y - z["w"] @ X.T) ** 2, axis=1) / z["sigma"] ** 2,
        lambda z: np.log(np.sum((y - z["w"] @ X.T) ** 2, axis=1)),
    ):
        difference = np.reshape(function(after) - function(before), (size, -1))
        assert np.all(stats.ttest_1samp(difference, 0.0).pvalue > level)


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_start_that_is_not_finite_is_refused(num_chains):
    case = truth.fixed_case()
    slabs = np.ones((2, 4) if num_chains == 2 else 4)
    slabs.flat[-1] = np.nan
    mcmc = alone(case, 20, num_chains=num_chains)
    with pytest.raises(
        ValueError, match=r"PairedGibbs: init_params\['w_slab'\]: got values that are not finite"
    ):
        mcmc.run(KEY, *case.args, init_params={"w_slab": slabs})


def test_a_chain_stays_finite(x64):
    """Where the data leave no noise, and from slabs that are not finite."""
    X = random.normal(KEY, (30, 4))
    kernel = nss.PairedGibbs(truth.noise_model)
    args = X, X[:, 0]
    start = {"sigma": 1.0, "w_slab": jnp.full(4, 1e200), "w_spike": jnp.ones(4, int)}
    state = kernel.init(KEY, 0, start, args, {})
    assert jnp.all(jnp.isfinite(state.z["w_slab"]))

    def step(state, _):
        state = kernel.sample(state, args, {})
        return state, state.z

    draws = jax.jit(lambda state: jax.lax.scan(step, state, length=300)[1])(state)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    np.testing.assert_allclose(draws["w_slab"][100:, 0], 1.0, atol=1e-3)
