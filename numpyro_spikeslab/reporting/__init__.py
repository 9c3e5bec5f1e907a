# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures over ArviZ data; they know nothing of the other folders."""
