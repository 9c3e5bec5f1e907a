# SPDX-License-Identifier: Apache-2.0
"""Read a user's model once, into a short description and arrays at given values of its sites."""
