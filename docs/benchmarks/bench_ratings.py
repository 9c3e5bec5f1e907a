# SPDX-License-Identifier: Apache-2.0
"""Sparse factor analysis of ratings: seconds a sweep, memory, and the planted signal's error.

``python docs/benchmarks/bench_ratings.py`` makes a set of the size of MovieLens 10M (71,567 users,
10,681 films, ten million ratings, 20 planted sparse factors), holds out one rating in a hundred and
fits it; ``--ratings 1000000`` makes a smaller one, of as many users and films less.
"""

import argparse
from resource import RUSAGE_SELF, getrusage
import time

import numpy as np
from scipy.sparse import coo_array

import jax

import numpyro_spikeslab as nss

NOISE = 0.8


def planted(rng, num_users, num_items, number, num_factors):
    """Entries of a table of sparse factors; users and items have very different numbers of them."""
    W = rng.normal(size=(num_items, num_factors)) * (rng.random((num_items, num_factors)) < 0.3)
    phi = rng.normal(size=(num_users, num_factors))
    popular = 1 / (np.arange(num_items) + 50.0)
    active = rng.gamma(0.7, size=num_users) + 0.1
    places = np.empty(0, np.int64)
    while places.size < number:
        rows = rng.choice(num_users, number, p=active / active.sum())
        columns = rng.choice(num_items, number, p=popular / popular.sum())
        places = np.unique(np.append(places, rows * num_items + columns))
    rows, columns = np.divmod(rng.permutation(places)[:number], num_items)
    signal = np.concatenate(
        [
            np.einsum("lm,lm->l", W[columns[k : k + 2**16]], phi[rows[k : k + 2**16]])
            for k in range(0, number, 2**16)
        ]
    ) / np.sqrt(0.3 * num_factors)
    values = (signal + NOISE * rng.normal(size=number)).astype(np.float32)
    return rows, columns, values, signal, W / np.sqrt(0.3 * num_factors)


def with_known_loadings(Y, W, rows, columns):
    """What would be predicted with the loadings known, and the factors of each user learned."""
    table, phi = Y.tocsr(), np.zeros((Y.shape[0], W.shape[1]))
    for n in range(len(phi)):
        own = slice(table.indptr[n], table.indptr[n + 1])
        A = W[table.indices[own]]
        precision = A.T @ A + NOISE**2 * np.eye(W.shape[1])
        phi[n] = np.linalg.solve(precision, A.T @ table.data[own])
    return np.einsum("lm,lm->l", W[columns], phi[rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratings", type=int, default=10_000_000)
    parser.add_argument("--factors", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    share = args.ratings / 1e7
    users, items = round(71_567 * share), max(round(10_681 * share), 2_000)
    rng = np.random.default_rng(0)
    rows, columns, values, signal, W = planted(rng, users, items, args.ratings, 20)
    held = rng.random(len(values)) < 0.01
    Y = coo_array((values[~held], (rows[~held], columns[~held])), shape=(users, items))
    print(f"{users} users, {items} items, {Y.nnz} ratings, {args.factors} factors", flush=True)
    best = with_known_loadings(Y, W, rows[held], columns[held])
    error = np.sqrt(np.mean((best - values[held]) ** 2))
    print(f"held-out RMSE with the loadings known {error:.4f} (noise {NOISE})", flush=True)
    model = nss.models.factor_analysis(args.factors, shared_noise=True)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    start = time.perf_counter()
    state = svi.run(jax.random.key(0), 1, Y, progress_bar=False).state
    print(f"first step, with all preparations: {time.perf_counter() - start:.1f} s", flush=True)
    steps = 1
    while steps < args.steps:
        number = min(10, args.steps - steps)
        start = time.perf_counter()
        result = svi.run(jax.random.key(0), number, Y, init_state=state, progress_bar=False)
        seconds = time.perf_counter() - start
        state, steps = result.state, steps + number
        mean, _ = guide.predict(result.params, Y, entries=(rows[held], columns[held]))
        error = np.sqrt(np.mean((np.asarray(mean) - values[held]) ** 2))
        off = np.sqrt(np.mean((np.asarray(mean) - signal[held]) ** 2))
        print(
            f"{steps} steps: bound {-result.losses[-1]:.0f}, {seconds / number:.2f} s a step; "
            f"held-out RMSE {error:.4f}, of the signal {off:.4f}",
            flush=True,
        )
    included = float(np.mean(guide.inclusion_probabilities(result.params)["W"]))
    memory = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
    print(f"share of loadings included {included:.3f} (0.3 planted); peak memory {memory:.1f} GB")


if __name__ == "__main__":
    main()
