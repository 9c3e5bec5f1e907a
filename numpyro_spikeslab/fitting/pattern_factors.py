# SPDX-License-Identifier: Apache-2.0
"""Blocks and groups of weights in a guide: their parameters, draws and marginals."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PatternMeanField
from numpyro_spikeslab.algebra.partition import Partition, Stack, joined
from numpyro_spikeslab.algebra.patterns import SetFactors, prior_slabs, slabs_given, stack_mixtures
from numpyro_spikeslab.algebra.quantiles import single
from numpyro_spikeslab.fitting.blocks import check_columns
from numpyro_spikeslab.fitting.guide_factors import Marginals, PairFactors, Start
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.sites import Pair


class PatternFactors(PairFactors):
    """Sets of weights with one joint factor each, by site, and independent pairs of all others."""

    def __init__(self, prefix: str, partitions: dict[str, Partition]) -> None:
        super().__init__(prefix)
        self.partitions = partitions
        blocks = {name: list(map(list, x.blocks)) for name, x in partitions.items()}
        self.blocks = blocks if any(blocks.values()) else None

    def _set_names(self, name: str, size: int) -> list[str]:
        """Return the names of the parameters of the sets of ``size`` weights of a site."""
        return [f"{name}_{self.prefix}_{part}_{size}" for part in SetFactors._fields]

    def shape(self, pair: Pair) -> tuple[int, ...]:
        partition = self.partitions[pair.name]
        return (len(partition.singles),) if partition.stacks else pair.shape

    def start(self, pair: Pair, scale: Any) -> Start:
        partition = self.partitions[pair.name]
        single_scale, scales = partition.cut(jnp.ravel(scale), fill=1.0)
        # without sets parameters have the shape of the weights
        start = super().start(pair, single_scale if partition.stacks else scale)
        for ((S, b), stack), scale in zip(partition.stacks.items(), scales, strict=True):
            linear, tril = prior_slabs(scale)
            patterns = jnp.full((len(stack.members), S), 1 / S, scale.dtype)
            supports = constraints.simplex, constraints.real, constraints.lower_cholesky
            starts = zip((patterns, linear, tril), supports, strict=True)
            start |= zip(self._set_names(pair.name, b), starts, strict=True)
        return start

    def sample(
        self, pair: Pair, params: dict[str, Any], prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        partition = self.partitions[pair.name]
        single_scale, scales = partition.cut(jnp.ravel(prior_scale), fill=1.0)
        probs, loc, sd = map(jnp.ravel, self.values(pair.name, params))
        spikes = self._auxiliary(pair, "spikes", dist.Bernoulli(probs=probs))
        normal = dist.Normal(spikes * loc, jnp.where(spikes, sd, single_scale))
        draws = [(spikes.astype(loc.dtype), self._auxiliary(pair, "slabs", normal))]
        density = jnp.zeros(())
        for (stack, factors), scale in zip(self._stacks(pair, params), scales, strict=True):
            b = stack.members.shape[1]
            # in single precision a sum of hundreds of probabilities differs from 1 by over 1e-6
            choice = dist.Categorical(probs=factors.patterns, validate_args=False)
            spikes = jnp.asarray(stack.patterns)[self._auxiliary(pair, f"patterns_{b}", choice)]
            mean, tril = slabs_given(factors, spikes, scale)
            joint = dist.MultivariateNormal(mean, scale_tril=tril)
            slabs = self._auxiliary(pair, f"slabs_{b}", joint)
            draws.append((spikes, slabs))
            # the padding is standard normal
            padding = jnp.where(stack.members < partition.size, 0, dist.Normal().log_prob(slabs))
            density += jnp.sum(padding)
        spike, slab = (
            partition.flat(x[0], x[1:]).reshape(pair.shape) for x in zip(*draws, strict=True)
        )
        with within(pair.spike):
            spike = numpyro.sample(pair.spike, dist.Delta(pair.of_spikes(spike).astype(int)))
        with within(pair.slab):
            # the model has no padding, so its density is taken off again
            slab = numpyro.sample(pair.slab, dist.Delta(slab, log_density=-density / pair.size))
        return {pair.spike: spike, pair.slab: slab}

    def _auxiliary(self, pair: Pair, part: str, fn: Any) -> Any:
        """Sample outside of the plates of the weights, as AutoContinuous does."""
        name = self._auxiliary_name(pair, part)
        return numpyro.sample(name, fn.to_event(1), infer={"is_auxiliary": True})

    def _auxiliary_name(self, pair: Pair, part: str) -> str:
        return f"_{pair.name}_{self.prefix}_{part}"

    def auxiliary_values(self, pairs: Sequence[Pair], draws: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for pair in pairs:
            partition = self.partitions[pair.name]
            slab, spike = draws[pair.slab], pair.of_weights(draws[pair.spike])
            flat = (*slab.shape[: slab.ndim - len(pair.shape)], pair.size)
            single_spike, spikes = partition.cut(jnp.reshape(spike, flat))
            single_slab, slabs = partition.cut(jnp.reshape(slab, flat))
            parts = {"spikes": single_spike, "slabs": single_slab}
            for stack, spike, slab in zip(partition.stacks.values(), spikes, slabs, strict=True):
                b = spike.shape[-1]
                parts |= {f"patterns_{b}": stack.which(spike), f"slabs_{b}": slab}
            values |= {self._auxiliary_name(pair, part): x for part, x in parts.items()}
        return values

    def marginals(self, pair: Pair, params: dict[str, Any]) -> Marginals:
        singles = single(*map(jnp.ravel, self.values(pair.name, params)))
        marginals: Marginals = [(self.partitions[pair.name].singles, singles)]
        for stack, factors in self._stacks(pair, params):
            marginals.append((stack.members.ravel(), stack_mixtures(factors, stack.patterns)))
        return marginals

    def _stacks(self, pair: Pair, params: dict[str, Any]) -> Iterator[tuple[Stack, SetFactors]]:
        for (_, b), stack in self.partitions[pair.name].stacks.items():
            patterns, linear, tril = (params[key] for key in self._set_names(pair.name, b))
            # gradients may have moved the padding
            is_real = stack.members < pair.size
            linear = jnp.where(is_real, linear, 0)
            tril = jnp.where(is_real[:, :, None] & is_real[:, None], tril, jnp.eye(b))
            yield stack, SetFactors(patterns, linear, tril)

    def pack(self, form: Form, params: dict[str, Any]) -> PatternMeanField:
        check_columns(form)
        partition = joined(tuple(self.partitions[pair.name] for pair in form.pairs))
        stacks: dict[Any, list[SetFactors]] = {key: [] for key in partition.stacks}
        for pair in form.pairs:
            for stack, factors in self._stacks(pair, params):
                stacks[stack.patterns.shape].append(factors)
        joint = [jax.tree.map(lambda *x: jnp.concatenate(x), *parts) for parts in stacks.values()]
        return PatternMeanField.of(partition, super().pack(form, params), joint)

    def unpack(self, pairs: Sequence[Pair], family: PatternMeanField) -> dict[str, Any]:
        stacks: dict[Any, Any] = dict(zip(family.partition.stacks, family.stacks, strict=True))
        params = super().unpack(pairs, family.singles)
        for pair in pairs:
            for key, stack in self.partitions[pair.name].stacks.items():
                count = len(stack.members)
                values = [x[:count] for x in stacks[key]]
                params |= zip(self._set_names(pair.name, key[1]), values, strict=True)
                stacks[key] = [x[count:] for x in stacks[key]]
        return params
