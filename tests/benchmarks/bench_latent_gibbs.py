# SPDX-License-Identifier: Apache-2.0
"""The collapsed draw of kernel parameters against NUTS, and what moves of scale are worth.

On the toy data of several tasks. Effective sample sizes per second, each pair in one run:

- of the log length scales, given the weights of a fit to every fourth input: `LatentGibbs` against
  `NUTS` on the functions and their length scales together;
- of the slab scale, in the whole model: `mtmkl_kernel` with its moves of scale and without, first
  with no other moves of weights and functions together, then beside these.

Run: ``python tests/benchmarks/bench_latent_gibbs.py``.
"""

from time import perf_counter
from unittest.mock import patch

import numpy as np
from timing import Compilations, enable_x64
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import toy_multioutput
from numpyro_spikeslab.sampling import function_sweep

compilations = Compilations()


def run(kernel, num_warmup, num_samples, *args, init_params=None, **kwargs):
    """The draws, and seconds of their phase without compilation."""
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.warmup(random.key(0), *args, init_params=init_params, **kwargs)
    before, start = compilations.seconds, perf_counter()
    mcmc.run(random.key(1), *args, **kwargs)
    draws = jax.block_until_ready(mcmc.get_samples())
    return draws, perf_counter() - start - (compilations.seconds - before)


def ess(x) -> float:
    return float(effective_sample_size(np.asarray(x, float)[None]))


def fitted(X, Y, num_functions):
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * num_functions)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    result = svi.run(random.key(0), 60, X, Y, progress_bar=False)
    return model, guide.to_init_params(result.params, X, Y)


def kernel_parameters(X, Y) -> None:
    model, start = fitted(X, Y, 4)
    own = ("phi", "phi_scale")
    values = {name: x for name, x in start.items() if name not in own}
    unconstrained = {"phi": start["phi"], "phi_scale": jnp.log(start["phi_scale"])}
    rates = {}
    for name, kernel, init, num_warmup, num_samples in (
        ("LatentGibbs", nss.LatentGibbs(model), {k: start[k] for k in own}, 200, 1000),
        ("NUTS", NUTS(conditioned(model)), unconstrained, 100, 100),
    ):
        draws, elapsed = run(
            kernel, num_warmup, num_samples, X, Y, init_params=init, **{GIBBS_SITES_KWARG: values}
        )
        smallest = min(ess(np.log(column)) for column in np.asarray(draws["phi_scale"]).T)
        rates[name] = smallest / elapsed
        print(
            f"{name}: min ESS of the log length scales {smallest:.0f} in {elapsed:.1f} s, "
            f"{1e3 * elapsed / num_samples:.1f} ms a step",
            flush=True,
        )
    print(f"ratio {rates['LatentGibbs'] / rates['NUTS']:.0f} (wanted: at least 20)", flush=True)


def scale_moves(X, Y) -> None:
    model, start = fitted(X, Y, 7)
    rates = []
    for rescale in (True, False):
        kernel = nss.mtmkl_kernel(model, rescale=rescale, accelerate=0.0)
        draws, elapsed = run(kernel, 300, 1500, X, Y, init_params=start)
        size = ess(np.log(draws["slab_scale"]))
        rates.append(size / elapsed)
        print(
            f"rescale={rescale}: ESS of the log slab scale {size:.0f} in {elapsed:.1f} s, "
            f"{elapsed / 1.5:.1f} ms a step",
            flush=True,
        )
    print(f"ratio {rates[0] / rates[1]:.1f}", flush=True)


# the moves of weights whose functions are integrated out, which move scales as well
NO_OTHER_MOVES = dict(
    draw_columns=lambda key, others, fixed, state, system: state,
    draw_two=lambda key, fixed, state, prior_draws: state,
)


def main() -> None:
    enable_x64()
    toy = toy_multioutput(0)
    X, Y = jnp.asarray(toy.X), jnp.asarray(np.where(toy.observed, toy.Y, np.nan))
    print("without the other moves of weights and functions together (wanted: at least 5)")
    with patch.multiple(function_sweep, **NO_OTHER_MOVES):
        scale_moves(X, Y)
    print("beside them")
    scale_moves(X, Y)
    kernel_parameters(X[::4], Y[::4])


if __name__ == "__main__":
    main()
