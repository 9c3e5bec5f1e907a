# SPDX-License-Identifier: Apache-2.0
"""Boston housing, as in the paper's Table 1: paired against standard mean field, 300 starts."""

from pathlib import Path
import sys

from timing import enable_x64, row

from numpyro_spikeslab.datasets import boston_housing

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import boston_housing as example


def main() -> None:
    enable_x64()
    data = boston_housing()
    exact = example.exact_posterior(data.X, data.y)
    fits = {k: fit["extreme"] for k, fit in example.fit_families(data, exact).items()}
    errors = {k: float(fit.error.mean()) for k, fit in fits.items()}
    gaps = {k: float(exact.log_evidence - fit.bounds[:, -1].mean()) for k, fit in fits.items()}
    for name, problem in (
        ("annealed PMF", "Boston housing, annealed"),
        ("PMF", "Boston housing, not annealed"),
    ):
        for what, x in (("errors of all means", errors), ("nats below log evidence", gaps)):
            ours, theirs = x[name], x["MF"]
            row(problem, what, ours, "standard mean field", theirs, theirs / ours)


if __name__ == "__main__":
    main()
