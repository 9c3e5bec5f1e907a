# SPDX-License-Identifier: Apache-2.0
"""Exact block kernels for :class:`numpyro.infer.Gibbs`."""
