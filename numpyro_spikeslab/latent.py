# SPDX-License-Identifier: Apache-2.0
from numpyro_spikeslab.algebra.covariance import *  # noqa
from numpyro_spikeslab.algebra.gaussian import *  # noqa
from numpyro_spikeslab.algebra.kernels import *  # noqa
