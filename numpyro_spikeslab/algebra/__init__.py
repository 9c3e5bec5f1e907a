# SPDX-License-Identifier: Apache-2.0
"""Arrays in, arrays out: the mathematics of pairs, functions and searches. Knows no NumPyro."""
