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


def mesh_of_several(tree: Any) -> Mesh | None:
    """Return the mesh of concrete sharded arrays, `None` if each array is on one device."""
    arrays = filter(not_jax_tracer, jax.tree.leaves(tree))
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in arrays)
    return next((mesh for mesh in meshes if mesh is not None and mesh.size > 1), None)


def on_every_device(tree: Any, mesh: Mesh | None) -> Any:
    """Replicate arrays on each device of a mesh."""
    if mesh is None:
        return tree
    return jax.device_put(fetched(tree), NamedSharding(mesh, PartitionSpec()))
