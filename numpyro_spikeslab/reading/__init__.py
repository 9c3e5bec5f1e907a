# SPDX-License-Identifier: Apache-2.0
"""Reads a user's model once: what it is, and its arrays at given values of its sites."""
