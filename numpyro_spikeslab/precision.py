# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in the precision of their entries, on all devices."""

import jax

# GPUs since Ampere and TPUs round the float32 entries of a product to some ten bits unless it asks
# for more. Products of features, so rounded, are those of other features: bounds rise and fall by
# hundreds of nats. A decorator of what users call; what NumPyro compiles stays as it is.
full_precision = jax.default_matmul_precision("float32")
