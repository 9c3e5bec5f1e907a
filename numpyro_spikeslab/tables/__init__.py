# SPDX-License-Identifier: Apache-2.0
"""The regression of a table: from its columns to a report."""
