# SPDX-License-Identifier: Apache-2.0
"""What all folders use: messages, precision, devices, priors, numbers."""
