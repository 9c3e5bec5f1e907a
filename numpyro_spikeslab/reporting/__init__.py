# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures over ArviZ data, independent of models and fits."""
