# SPDX-License-Identifier: Apache-2.0
"""Helpers of every folder: messages, precision, devices, facts about priors, tables of numbers."""
