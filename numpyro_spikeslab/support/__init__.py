# SPDX-License-Identifier: Apache-2.0
"""What every folder uses: messages, precision, devices, facts about priors, tables of numbers."""
