# SPDX-License-Identifier: Apache-2.0
"""Variational inference: guides, coordinate ascent, starts and moves."""
