# SPDX-License-Identifier: Apache-2.0
"""The factors of a paired guide whose weights stand in blocks, and the search for blocks."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.blocks import BlockMeanField, Blocks
from numpyro_spikeslab.algebra.correlation import clusters, unit_columns
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.patterns import (
    MAX_BLOCK,
    Stack,
    excluded_too,
    prior_slabs,
    stack_mixtures,
)
from numpyro_spikeslab.algebra.quantiles import SlabMixtures, single
from numpyro_spikeslab.fitting.guide_factors import PairFactors, declared
from numpyro_spikeslab.reading.form import COLUMNS, Form, Pair, find_pairs, observed_sites
from numpyro_spikeslab.reading.program import (
    are_concrete,
    compiled,
    outside_transformations,
)
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.view import design_rows

AUTO = "auto"

Asked = str | dict[str | None, tuple[tuple[int, ...], ...]]
"""What an author gives, checked: sets by site, ``None`` for the only site."""


SiteBlocks = dict[str, tuple[tuple[int, ...], Blocks]]
"""Shape and blocks of each site."""


class BlockFactors(PairFactors):
    """The factors of blocks of weights; those without a block are pairs.

    :param prefix: part of the parameters' names.
    :param blocks: as in :class:`PairedGuide`.
    """

    def __init__(self, prefix: str, blocks: Any) -> None:
        super().__init__(prefix)
        self.asked = checked(blocks)
        self._known: SiteBlocks = {}
        self._every: dict[tuple, SiteBlocks] = {}

    @property
    def blocks(self) -> dict[str, list[list[int]]] | None:  # type: ignore[override]
        return {
            name: [list(one) for one in blocks.members if len(one) > 1]
            for name, (_, blocks) in self._known.items()
        }

    # Setting up

    def set_up(
        self, model: Callable, trace: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Note shapes and blocks of the sites of a model.

        :param trace: of the model at these arguments.
        :raises ValueError: if the model does not fit the blocks.
        """
        pairs = find_pairs(trace, "PairedGuide")
        refuse_groups(pairs)
        key = tuple((pair.name, pair.size) for pair in pairs)
        if key in self._every:
            # what has been found stays, or parameters would be those of other weights
            every = [blocks for _, blocks in self._every[key].values()]
        else:
            wanted = self._wanted(model, trace, args, kwargs)
            each = zip(pairs, sets_of(pairs, wanted), strict=True)
            every = [Blocks.completed(sets, pair.size) for pair, sets in each]
        self._known = self._every[key] = {
            pair.name: (pair.shape, blocks) for pair, blocks in zip(pairs, every, strict=True)
        }

    def _wanted(
        self, model: Callable, trace: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> dict[str | None, Any]:
        reading = None
        if observed_sites(trace):
            reading = Reader(model, "PairedGuide")(args, kwargs)
            check_columns(reading.form)
        return self.asked if isinstance(self.asked, dict) else found_blocks(reading)

    def _size(self, name: str, params: dict[str, Any]) -> int:
        """How many weights these are the parameters of."""
        start = self._stack_names(name, "")[Stack._fields.index("linear")]
        stacks = (x for key, x in params.items() if key.removeprefix(start).isdigit())
        return len(params[self.names(name)[0]]) + sum(prod(jnp.shape(x)) for x in stacks)

    def _of(self, name: str, params: dict[str, Any]) -> tuple[tuple[int, ...], Blocks]:
        """Shape and blocks of a site; of a guide that has not been called, of one axis."""
        sizes = {site: self._size(site, params) for site in self.sites(params)}
        for known in (self._known, *self._every.values()):
            if {site: prod(shape) for site, (shape, _) in known.items()} == sizes:
                return known[name]
        size = sizes[name]
        if not isinstance(self.asked, dict):
            raise ValueError(
                f'PairedGuide: a guide with blocks="auto" that has not been called with {size} '
                f"weights {name!r} does not know their blocks. Make it with those of the fitted "
                "guide, `PairedGuide(model, blocks=fitted.blocks)`."
            )
        sets = self.asked.get(name, self.asked.get(None, ()))
        return (size,), Blocks.completed(sets, size)

    # Parameters

    def _stack_names(self, name: str, size: Any) -> list[str]:
        return [f"{name}_{self.prefix}_{part}_{size}" for part in Stack._fields]

    def start(self, pair: Pair, scale: Any) -> dict[str, tuple[Any, Any]]:
        blocks = self._known[pair.name][1]
        alone, scales = blocks.cut(jnp.ravel(scale))
        found = super().start(pair, alone)
        for b, patterns, own in zip(blocks.sizes, blocks.patterns, scales, strict=True):
            linear, tril = prior_slabs(own)
            uniform = jnp.full((len(own), len(patterns)), 1 / len(patterns), own.dtype)
            starts = (
                (uniform, constraints.simplex),
                (linear, constraints.real),
                (tril, constraints.lower_cholesky),
            )
            found |= dict(zip(self._stack_names(pair.name, b), starts, strict=True))
        return found

    def _stacks(self, name: str, blocks: Blocks, params: dict[str, Any]) -> tuple[Stack, ...]:
        return tuple(Stack(*(params[x] for x in self._stack_names(name, b))) for b in blocks.sizes)

    def _family(self, names: list[str], params: dict[str, Any]) -> BlockMeanField:
        every = [self._of(name, params)[1] for name in names]
        blocks = joined(tuple(every))
        alone = ([params[key] for key in self.names(name)] for name in names)
        singles = PairedMeanField(*map(jnp.concatenate, zip(*alone, strict=True)))
        stacks = []
        for b in blocks.sizes:
            own = [
                Stack(*(params[x] for x in self._stack_names(name, b)))
                for name, each in zip(names, every, strict=True)
                if b in each.sizes
            ]
            stacks.append(Stack(*map(jnp.concatenate, zip(*own, strict=True))))
        return BlockMeanField.of(blocks, singles, tuple(stacks))

    def are_own(self, form: Form, factors: Any) -> bool:
        known = tuple(self._known[pair.name][1] for pair in form.pairs)
        return factors.blocks == joined(known)

    def pack(self, form: Form, params: dict[str, Any]) -> BlockMeanField:
        check_columns(form)
        return self._family([pair.name for pair in form.pairs], params)

    def unpack(self, form: Form, factors: BlockMeanField) -> dict[str, Any]:
        params: dict[str, Any] = {}
        singles = factors.singles
        stacks = dict(zip(factors.blocks.sizes, factors.stacks, strict=True))
        first: dict[int, int] = {}

        def following(x, size, count):
            return x[first.get(size, 0) : first.get(size, 0) + count]

        for pair in form.pairs:
            blocks = self._known[pair.name][1]
            count = {1: len(blocks.singles)}
            for key, x in zip(self.names(pair.name), singles, strict=True):
                params[key] = following(x, 1, count[1])
            for b, stack in zip(blocks.sizes, blocks.stacks, strict=True):
                count[b] = len(stack)
                for key, x in zip(self._stack_names(pair.name, b), stacks[b], strict=True):
                    params[key] = following(x, b, count[b])
            first = {b: first.get(b, 0) + count.get(b, 0) for b in {*first, *count}}
        return params

    # Draws

    def sample(
        self, pair: Pair, start: dict[str, tuple[Any, Any]], prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        shape, blocks = self._known[pair.name]
        params = dict(zip(start, declared(start), strict=True))
        alone, scales = blocks.cut(jnp.ravel(prior_scale))
        drawn = [self._sample_singles(pair, params, alone)]
        for stack, b, patterns, own in zip(
            self._stacks(pair.name, blocks, params),
            blocks.sizes,
            blocks.patterns,
            scales,
            strict=True,
        ):
            # the sum of hundreds of probabilities in single precision is not 1 to NumPyro's 1e-6
            choice = dist.Categorical(probs=stack.patterns, validate_args=False)
            which = self._auxiliary(pair, f"patterns_{b}", choice)
            spikes = jnp.asarray(patterns)[which]
            mean, tril = excluded_too(stack, spikes, own)
            slabs = dist.MultivariateNormal(mean, scale_tril=tril)
            drawn.append((spikes, self._auxiliary(pair, f"slabs_{b}", slabs)))
        spike, slab = (blocks.flat(x[0], x[1:]).reshape(shape) for x in zip(*drawn, strict=True))
        with within(pair.slab):
            spike = numpyro.sample(pair.spike, dist.Delta(spike.astype(int)))
            slab = numpyro.sample(pair.slab, dist.Delta(slab))
        return {pair.spike: spike, pair.slab: slab}

    def _sample_singles(self, pair: Pair, params: dict[str, Any], prior_scale: Any) -> Any:
        probs, loc, scale = (params[key] for key in self.names(pair.name))
        spike = self._auxiliary(pair, "spikes", dist.Bernoulli(probs=probs))
        normal = dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
        return spike.astype(loc.dtype), self._auxiliary(pair, "slabs", normal)

    def _auxiliary(self, pair: Pair, part: str, fn: Any) -> Any:
        """A draw of what stands across the plates of the weights, as in AutoContinuous."""
        name = self._auxiliary_name(pair, part)
        return numpyro.sample(name, fn.to_event(1), infer={"is_auxiliary": True})

    def _auxiliary_name(self, pair: Pair, part: str) -> str:
        return f"_{pair.name}_{self.prefix}_{part}"

    def auxiliary_values(self, pairs: tuple[Pair, ...], draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the auxiliary sites that give these ``draws`` of spikes and slabs."""
        values = {}
        for name, (shape, blocks) in self._known.items():
            pair = Pair(name, shape)
            spike, slab = (
                x.reshape(*x.shape[: x.ndim - len(shape)], pair.size)
                for x in (draws[pair.spike], draws[pair.slab])
            )
            values[self._auxiliary_name(pair, "spikes")] = spike[..., blocks.singles]
            values[self._auxiliary_name(pair, "slabs")] = slab[..., blocks.singles]
            for b, stack in zip(blocks.sizes, blocks.stacks, strict=True):
                # patterns are in the order of binary numbers
                which = jnp.asarray(spike, int)[..., stack] @ 2 ** np.arange(b)[::-1]
                values[self._auxiliary_name(pair, f"patterns_{b}")] = which
                values[self._auxiliary_name(pair, f"slabs_{b}")] = slab[..., stack]
        return values

    # Summaries

    def marginal(self, name: str, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        shape, family = self._of(name, params)[0], self._family([name], params)
        probs, loc, scale = (x.reshape(shape) for x in (family.probs, family.loc, family.scale))
        return probs, loc, scale

    def slab_mixtures(self, name: str, params: dict[str, Any]) -> list[SlabMixtures]:
        blocks = self._of(name, params)[1]
        stacks = zip(self._stacks(name, blocks, params), blocks.patterns, strict=True)
        return [
            single(*(params[key] for key in self.names(name))),
            *(stack_mixtures(stack, patterns) for stack, patterns in stacks),
        ]

    def in_order(self, name: str, params: dict[str, Any], parts: list[Any]) -> Any:
        flat = self._of(name, params)[1].flat
        return jax.vmap(lambda *each: flat(each[0], each[1:]))(*parts)


@lru_cache
def joined(every: tuple[Blocks, ...]) -> Blocks:
    """The blocks of the joined weights of several sites."""
    ends = np.cumsum([0, *(blocks.size for blocks in every)]).tolist()
    return Blocks(
        tuple(
            tuple(first + m for m in one)
            for first, blocks in zip(ends[:-1], every, strict=True)
            for one in blocks.members
        )
    )


# What is asked for


def checked(blocks: Any) -> Asked:
    """The blocks of an author, by site, ``None`` for the only one.

    :raises TypeError: if they are no sets of integers.
    :raises ValueError: if a block is empty, too large, has a weight twice or shares one.
    """
    if isinstance(blocks, str) and blocks == AUTO:
        return AUTO
    by_site = blocks if isinstance(blocks, Mapping) else {None: blocks}
    return {name: _checked_sets(sets, name) for name, sets in by_site.items()}


def _checked_sets(sets: Any, name: str | None) -> tuple[tuple[int, ...], ...]:
    where, auto = ("blocks", '"auto" or ') if name is None else (f"blocks[{name!r}]", "")
    if isinstance(sets, str) or not isinstance(sets, Iterable):
        raise TypeError(
            f"PairedGuide: {where}: got {sets!r}, expected {auto}a list of lists of the "
            "numbers of weights, as in [[0, 1, 2], [7, 8]]."
        )
    found = tuple(_checked_set(one, where) for one in sets)
    owners: dict[int, tuple[int, ...]] = {}
    for one in found:
        for m in one:
            if m in owners:
                raise ValueError(
                    f"PairedGuide: {where}: the weight {m} is in {list(owners[m])} and "
                    f"{list(one)}, expected sets without a common weight. Join the two, or name "
                    "it in one."
                )
            owners[m] = one
    return found


def _checked_set(one: Any, where: str) -> tuple[int, ...]:
    try:
        if isinstance(one, str) or any(isinstance(m, bool | np.bool_) for m in one):
            raise TypeError
        members = tuple(index(m) for m in one)
    except TypeError:
        raise TypeError(
            f"PairedGuide: {where}: got the block {one!r}, expected a list of the numbers of "
            "weights, as in [0, 1, 2]. A single block is a list in a list, [[0, 1, 2]]."
        ) from None
    if not 1 <= len(members) <= MAX_BLOCK:
        raise ValueError(
            f"PairedGuide: {where}: got a block of {len(members)} weights, expected 1 to "
            f"{MAX_BLOCK}, for a block of b weights has 2^b patterns. Split it; weights that are "
            "not named stand alone."
        )
    if len(set(members)) < len(members):
        raise ValueError(
            f"PairedGuide: {where}: the block {list(members)} has a weight twice, expected each "
            "once."
        )
    return members


def sets_of(pairs: tuple[Pair, ...], asked: dict[str | None, Any]) -> list[Any]:
    """The blocks of each site.

    :raises ValueError: if a site is not there, not named, or has no such weight.
    """
    names = [pair.name for pair in pairs]
    if None in asked and len(pairs) > 1:
        raise ValueError(
            f"PairedGuide: blocks: the model has the spike_slab sites {names}, expected blocks by "
            f"site, as in blocks={{{names[0]!r}: [[0, 1]]}}."
        )
    if unknown := [name for name in asked if name not in [None, *names]]:
        raise ValueError(
            f"PairedGuide: blocks: got blocks of {unknown}, expected of {names}, the "
            "spike-and-slab weights of the model."
        )
    found = [asked.get(pair.name, asked.get(None, ())) for pair in pairs]
    for pair, sets in zip(pairs, found, strict=True):
        if outside := sorted({m for one in sets for m in one if not 0 <= m < pair.size}):
            raise ValueError(
                f"PairedGuide: blocks: got the weights {outside} of {pair.name!r}, expected "
                f"numbers from 0 to {pair.size - 1} of its {pair.size} weights, flattened."
            )
    return found


def refuse_groups(pairs: tuple[Pair, ...]) -> None:
    """Refuse weights that share a spike: a group has a joint factor already."""
    if names := [pair.name for pair in pairs if pair.groups is not None]:
        raise ValueError(
            f"PairedGuide: blocks: the weights {names} share spikes, expected one for each weight. "
            "Leave out `blocks`, or `groups` of spike_slab."
        )


def check_columns(form: Form) -> None:
    """Refuse weights that multiply something else than columns."""
    if form.kind != COLUMNS:
        raise ValueError(
            f"PairedGuide: blocks: the weights {form.pairs[0].name!r} multiply features of "
            "several tasks or latent functions, expected the columns of one design, as in `X @ w`. "
            "Leave `blocks` out."
        )


# The search


def found_blocks(reading: Reading | None) -> dict[str | None, list[list[int]]]:
    """Correlated columns of each site.

    :raises ValueError: if the columns are not known.
    """
    if reading is None:
        raise ValueError(
            'PairedGuide: blocks="auto" are found among the columns of the data, but nothing is '
            "observed. Call the guide with the arguments of the fit first, or list the blocks, as "
            "in the attribute `blocks` of the fitted guide."
        )
    form = reading.form
    name = form.pairs[0].name
    if not are_concrete(reading.constants):
        raise ValueError(
            f'PairedGuide: blocks="auto": the columns of {name!r} are traced by a transformation '
            "such as jit or vmap, expected known ones. Call the guide with data outside of it "
            "first, or list the blocks."
        )
    if not form.constant_rows:
        raise ValueError(
            f'PairedGuide: blocks="auto": the columns of {name!r} depend on other latent sites, '
            "expected known ones. List the blocks."
        )
    rows, seen = _columns(reading)
    unit = unit_columns(np.asarray(rows, float)[:, np.asarray(seen)].T)
    ends = np.cumsum([pair.size for pair in form.pairs])[:-1]
    parts = np.split(unit, ends, axis=1)
    return {pair.name: clusters(part) for pair, part in zip(form.pairs, parts, strict=True)}


def _columns(reading: Reading) -> tuple[Any, Any]:
    """The design, features as rows, and which observations are there."""

    def of():
        seen = reading.view(reading.generic).relative[:, 0] > 0
        rows = design_rows(reading.problem, reading.generic)
        # what is not observed may be NaN
        return jnp.where(seen, rows, 0), seen

    with outside_transformations():
        return compiled(of, once=True)
