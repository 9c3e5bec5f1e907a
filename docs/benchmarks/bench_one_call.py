# SPDX-License-Identifier: Apache-2.0
"""One call of `sparse_regression` in a new process, with compilation, and once more."""

from time import perf_counter

from bench_mixing import diabetes
from timing import row

from jax import random

import numpyro_spikeslab as nss


def main() -> None:
    X, y, _ = diabetes()
    times = []
    for seed in range(2):
        start = perf_counter()
        nss.sparse_regression(random.key(seed), X, y)
        times.append(perf_counter() - start)
    first, again = times
    what = "seconds of a second call"
    row("diabetes, 442 x 64", what, again, "itself: first call", first, first / again)


if __name__ == "__main__":
    main()
