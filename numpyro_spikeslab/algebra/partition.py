# SPDX-License-Identifier: Apache-2.0
"""Sets of weights with one joint factor each, and the inclusion patterns that a set allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Shaped
import numpy as np

import jax.numpy as jnp

MAX_BLOCK = 10
"""Weights of a block at most: one of b weights has 2**b patterns."""

Sets = tuple[tuple[int, ...], ...]


@lru_cache
def every_pattern(size: int) -> Float[np.ndarray, "S b"]:
    """Return all inclusion patterns of b weights in the order of binary numbers, none first."""
    # types here are the same in either precision, since JAX caches by type
    return np.array(list(product((0, 1), repeat=size)), np.float32)


class Stack(NamedTuple):
    """G sets of b weights that allow the same patterns.

    - **members** - the weights of each set; numbers from P on pad a set that is smaller.
    - **patterns** - the inclusion patterns; the first includes none.
    """

    members: Int[np.ndarray, "G b"]
    patterns: Float[np.ndarray, "S b"]

    def which(self, spikes: Any) -> Int[Array, "*D G"]:
        """Return the number of the pattern that the spikes of the members, (..., G, b), make."""
        spikes = jnp.asarray(spikes, int)
        if len(self.patterns) == 2:
            return spikes[..., 0]
        return spikes @ 2 ** np.arange(spikes.shape[-1])[::-1]


@dataclass(frozen=True)
class Partition:
    """P weights, and disjoint sets with one joint factor each; hashable.

    - **size** - P.
    - **blocks** - sets whose weights are included in any combination.
    - **groups** - sets whose weights share a spike: all are included, or none. They are padded to
      the next power of two, so that groups of many sizes form few stacks.
    """

    size: int
    blocks: Sets = ()
    groups: Sets = ()

    @classmethod
    def of_spikes(cls, spikes: Sequence[int], least: int = 2) -> "Partition":
        """Make the groups of ``least`` weights or more, given the number of each weight's spike."""
        index = np.asarray(spikes)
        order = np.argsort(index, kind="stable")
        sets = np.split(order, np.cumsum(np.bincount(index))[:-1])
        return cls(index.size, groups=tuple(tuple(x.tolist()) for x in sets if len(x) >= least))

    @cached_property
    def singles(self) -> Int[np.ndarray, " K"]:
        """The weights outside of all sets."""
        in_sets = [m for members in self.blocks + self.groups for m in members]
        return np.setdiff1d(np.arange(self.size), in_sets).astype(np.int32)

    @cached_property
    def alone(self) -> Bool[np.ndarray, " P"]:
        """Which weights share their spike with no other."""
        shared = [m for members in self.groups if len(members) > 1 for m in members]
        return ~np.isin(np.arange(self.size), shared)

    @cached_property
    def stacks(self) -> dict[tuple[int, int], Stack]:
        """The stacks by their numbers (S, b) of patterns and weights."""
        padding = [(1 << (len(x) - 1).bit_length()) - len(x) for x in self.groups]
        groups = [x + n * (self.size,) for x, n in zip(self.groups, padding, strict=True)]
        stacks = {}
        for sets, all_or_none in ((self.blocks, False), (groups, True)):
            for b in sorted({len(x) for x in sets}):
                members = np.array([x for x in sets if len(x) == b], np.int32)
                patterns = every_pattern(1).repeat(b, axis=1) if all_or_none else every_pattern(b)
                stacks[patterns.shape] = Stack(members, patterns)
        return stacks

    @cached_property
    def _places(self) -> Int[np.ndarray, " P"]:
        members = [stack.members.ravel() for stack in self.stacks.values()]
        order = np.argsort(np.concatenate([self.singles, *members]), kind="stable")
        return order[: self.size].astype(np.int32)

    def cut(self, x: Shaped[Array, "*D P"], fill: float = 0.0) -> tuple[Any, list[Any]]:
        """Return the entries of the singles, and those of each stack, padded by ``fill``."""
        if not self.stacks:
            return x, []
        stacks = (x.at[..., stack.members] for stack in self.stacks.values())
        return x[..., self.singles], [x.get(mode="fill", fill_value=fill) for x in stacks]

    def flat(self, singles: Any, stacks: Any) -> Shaped[Array, " P"]:
        """Put entries of the singles and of each stack in the order of the weights."""
        if not stacks:
            return singles
        return jnp.concatenate([singles, *map(jnp.ravel, stacks)])[self._places]


@lru_cache
def joined(parts: tuple[Partition, ...]) -> Partition:
    """Join the partitions of several sites, whose weights are numbered one site after the other."""
    starts = np.cumsum([0, *(part.size for part in parts)]).tolist()

    def shifted(name: str) -> Sets:
        return tuple(
            tuple(start + m for m in members)
            for start, part in zip(starts[:-1], parts, strict=True)
            for members in getattr(part, name)
        )

    return Partition(starts[-1], shifted("blocks"), shifted("groups"))
