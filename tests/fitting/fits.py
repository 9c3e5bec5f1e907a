# SPDX-License-Identifier: Apache-2.0
"""Short fits for the tests of CAVI, and comparisons of their results."""

import re

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro import infer

import numpyro_spikeslab as nss

KEY = random.key(0)


def cavi(case, guide=nss.PairedGuide, **options):
    options = {"temperature": None} | options
    return nss.CAVI(case.model, guide(case.model), **options)


def run(svi, case, num_steps=20, **options):
    return svi.run(KEY, num_steps, *case.args, **{"progress_bar": False} | options)


def same(x, y, tolerance=1e-12):
    def compare(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = random.key_data(a), random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, x, y)


def estimator_of_the_bound(model, guide, size=20_000):
    """A function of parameters and the model's arguments: NumPyro's estimate and its error."""

    @jax.jit
    def estimate(params, *args):
        def particle(key):
            return -infer.Trace_ELBO().loss(key, params, model, guide, *args)

        particles = jax.vmap(particle)(random.split(KEY, size))
        return jnp.mean(particles), jnp.std(particles) / jnp.sqrt(size)

    return estimate


def compilations(caplog):
    """Names of what was compiled, but for the copy of losses, which have the length of the run."""
    names = re.findall(r"Compiling jit\((.*?)\)", "\n".join(caplog.messages))
    return [name for name in names if name != "stage"]
