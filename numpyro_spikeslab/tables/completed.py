# SPDX-License-Identifier: Apache-2.0
"""Several completions of a table with gaps, whose chains are one posterior."""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import Array
import numpy as np
import xarray as xr

from jax import random

from numpyro_spikeslab.reporting.by_table import TABLE
from numpyro_spikeslab.reporting.stored_summary import stored_summary
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import in_pandas, row_labels
from numpyro_spikeslab.tables.checks import check_key, checked_table

MERGED = {"posterior", "sample_stats", "log_likelihood"}
"""Groups of a result with the dimension ``chain``."""


def completions(X: Any) -> list[Any] | None:
    """Return completed tables as a list, `None` if this is a table or a formula.

    :param X: a list, tuple or generator of them; a list of rows is one table.
    """
    is_list = isinstance(X, list | tuple) and len(X) > 0 and len(np.shape(X[0])) == 2
    return list(X) if is_list or isinstance(X, Iterator) else None


def checked_tables(tables: list[Any]) -> xr.DataArray:
    """Check that completed tables are alike, and put them side by side along ``table``.

    :raises ValueError: at the first one that differs from the first of all.
    """
    if len(tables) < 2:
        remedy = "A single table is no list; its fillings would count as data."
        raise bad("X", f"{len(tables)} completed tables", "two or more", remedy)
    checked, first = [], {"shape": (0, 0)}
    for k, given in enumerate(tables):
        table = checked_table(in_pandas(f"X[{k}]", given), row_labels(given), f"X[{k}]")
        facts: dict[str, Any] = {
            "shape": table.shape,
            "columns": table["feature"].values.tolist(),
            "labels of rows": table["row"].values.tolist(),
            "constant columns": np.flatnonzero(np.ptp(table.values, axis=0) == 0).tolist(),
        }
        first = facts if k == 0 else first
        for fact, x in facts.items():
            if x != first[fact]:
                expected = f"those of X[0], {first[fact]!s:.200}"
                raise bad(f"X[{k}]", f"the {fact} {x!s:.200}", expected)
        checked.append(table)
    return xr.concat(checked, TABLE)


def regress_each(key: Array, tables: list[Any], regress: Callable[..., xr.DataTree]) -> xr.DataTree:
    """Regress on each completed table, and join the chains.

    :param regress: takes a key, a table and, if chains do not stop by themselves, ``num_samples``.
    """
    check_key(key)
    X = checked_tables(tables)
    inputs = [*zip(random.split(key, len(tables)), tables, strict=True)]
    results = [regress(*each) for each in inputs]
    sizes = [result["posterior"].sizes["draw"] for result in results]
    for k, size in enumerate(sizes):
        if size < max(sizes):
            # the first draws stay the same
            results[k] = regress(*inputs[k], num_samples=max(sizes))
    return joined(results, X)


def joined(results: list[xr.DataTree], X: xr.DataArray) -> xr.DataTree:
    """Join the chains of results, whose tables are ``X``."""
    first, tree = results[0], xr.DataTree()
    for name in first.children.keys() & MERGED:
        parts = [result[name].to_dataset() for result in results]
        group = xr.concat(parts, "chain", data_vars="minimal", combine_attrs="override")
        numbers = np.repeat(np.arange(len(parts)), parts[0].sizes["chain"])
        chains = np.arange(len(numbers))
        tree[name] = group.assign_coords({"chain": chains, TABLE: ("chain", numbers)})
    tree["observed_data"] = first["observed_data"].to_dataset()
    constants = first["constant_data"].to_dataset()
    tree["constant_data"] = constants.assign(X=X.transpose("row", "feature", TABLE))
    summaries = [result["summary"].to_dataset() for result in results]
    attrs = {name: x for name, x in summaries[0].attrs.items() if name != "k_hat"}
    for name in [name for name, x in attrs.items() if isinstance(x, float)]:
        attrs[name] = float(np.mean([summary.attrs[name] for summary in summaries]))
    # all rows of all tables, whose correlations are near the means over tables
    rows = X.values.reshape(-1, X.sizes["feature"])
    sets = stored_summary(tree, rows, attrs.get("ratio"))
    means: Any = sum(summaries) / len(summaries)
    tree["summary"] = xr.Dataset({**means, **sets}, attrs=attrs)
    return tree
