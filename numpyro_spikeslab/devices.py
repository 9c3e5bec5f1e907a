# SPDX-License-Identifier: Apache-2.0
"""Arrays that are shared by several devices, of one process or of many."""

from typing import Any

import jax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro.util import not_jax_tracer


def fetched(tree: Any) -> Any:
    """Concrete arrays as numpy's, those that are sharded over processes whole."""

    def whole(x):
        shared = isinstance(x, jax.Array) and not x.is_fully_addressable
        return process_allgather(x, tiled=True) if shared else x

    with jax.core.eval_context():
        return jax.device_get(jax.tree.map(whole, tree))


def mesh_of(x: Any) -> Mesh | None:
    """The mesh of devices on which an array is, `None` where it is on none or is traced."""
    return getattr(getattr(x, "sharding", None), "mesh", None) if not_jax_tracer(x) else None


def mesh_of_several(tree: Any) -> Mesh | None:
    """The devices on which arrays are, `None` where each is on one."""
    meshes = map(mesh_of, jax.tree.leaves(tree))
    return next((m for m in meshes if m is not None and m.size > 1), None)


def on_every_device(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays that each device of a mesh has whole."""
    if mesh is None:
        return tree
    return jax.device_put(fetched(tree), NamedSharding(mesh, PartitionSpec()))
