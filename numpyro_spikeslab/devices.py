# SPDX-License-Identifier: Apache-2.0
"""Arrays that are sharded over several devices, in one process or many."""

from typing import Any

import jax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro.util import not_jax_tracer


def fetched(tree: Any) -> Any:
    """Copy concrete arrays to numpy, gathering arrays that are sharded over processes."""

    def whole(x):
        shared = isinstance(x, jax.Array) and not x.is_fully_addressable
        return process_allgather(x, tiled=True) if shared else x

    with jax.core.eval_context():
        return jax.device_get(jax.tree.map(whole, tree))


def mesh_of(x: Any) -> Mesh | None:
    """Return the mesh of an array, `None` if it has none or is traced."""
    return getattr(getattr(x, "sharding", None), "mesh", None) if not_jax_tracer(x) else None


def mesh_of_several(tree: Any) -> Mesh | None:
    """Return the mesh of sharded arrays, `None` if each array is on one device."""
    meshes = map(mesh_of, jax.tree.leaves(tree))
    return next((m for m in meshes if m is not None and m.size > 1), None)


def on_every_device(tree: Any, mesh: Mesh | None) -> Any:
    """Replicate arrays on each device of a mesh."""
    if mesh is None:
        return tree
    return jax.device_put(fetched(tree), NamedSharding(mesh, PartitionSpec()))
