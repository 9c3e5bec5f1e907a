# SPDX-License-Identifier: Apache-2.0
"""Paired Gibbs against NumPyro's DiscreteHMCGibbs(NUTS) on the same model, in one run.

Minimum effective sample size per second of the weights with inclusion probability above 0.02.
Run: ``python tests/benchmarks/bench_gibbs.py``.
"""

import arviz_stats
from bench_mixing import composite_model, equicorrelated, fixed_model, run
import numpy as np
from timing import enable_x64

from numpyro.infer import NUTS, DiscreteHMCGibbs, Gibbs

import numpyro_spikeslab as nss


def min_ess(draws: dict, counted: np.ndarray) -> float:
    w = np.asarray(draws["w"], dtype=float)[:, counted]
    return min(float(arviz_stats.ess(column[None], method="bulk")) for column in w.T)


def main(num_ours: int = 20_000, num_peers: tuple[int, int] = (10_000, 1000)) -> None:
    enable_x64()
    for size, num_peer in zip(((200, 100), (400, 500)), num_peers, strict=True):
        X, y, fixed = equicorrelated(*size)
        model = fixed_model(*fixed)
        ours, seconds = run(nss.PairedGibbs(model), num_ours, X, y, num_ours)
        counted = np.flatnonzero(np.asarray(ours["w_spike"]).mean(0) > 0.02)
        rate = min_ess(ours, counted) / seconds / num_ours
        print(f"N={size[0]}, P={size[1]}, {len(counted)} weights counted", flush=True)
        print(f"  PairedGibbs: {rate:.0f} min ESS/s, {seconds * 1e3:.3f} ms a step")
        peer, seconds = run(DiscreteHMCGibbs(NUTS(model)), num_peer, X, y, num_peer)
        peer_rate = min_ess(peer, counted) / seconds / num_peer
        print(
            f"  DiscreteHMCGibbs(NUTS), {num_peer} draws in {seconds * num_peer:.0f} s: "
            f"{peer_rate:.2f} min ESS/s; ratio {rate / peer_rate:.0f} (wanted: at least 200)"
        )
    blocks = [(nss.PairedGibbs(composite_model), nss.paired_sites), (NUTS(composite_model), None)]
    _, seconds = run(Gibbs(blocks), num_ours // 10, X, y, num_ours // 10)
    print(f"composite with NUTS at (400, 500): {seconds * 1e3:.3f} ms a step (at most 0.6)")


if __name__ == "__main__":
    main()
