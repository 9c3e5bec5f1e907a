# SPDX-License-Identifier: Apache-2.0
"""Blocks and groups of weights in a guide: their parameters, draws and marginals."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PairedMeanField, PatternMeanField
from numpyro_spikeslab.algebra.partition import Partition, Stack, joined
from numpyro_spikeslab.algebra.patterns import SetFactors, prior_slabs, slabs_given, stack_mixtures
from numpyro_spikeslab.algebra.quantiles import single
from numpyro_spikeslab.fitting.blocks import check_columns
from numpyro_spikeslab.fitting.guide_factors import Marginals, PairFactors, Start, declared
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.sites import Pair


class PatternFactors:
    """The :class:`~numpyro_spikeslab.fitting.guide_factors.GuideFactors` of sets of weights.

    :param prefix: part of the parameters' names.
    :param partitions: the sets of each site.
    """

    def __init__(self, prefix: str, partitions: dict[str, Partition]) -> None:
        self.prefix, self.partitions = prefix, partitions
        self.singles = PairFactors(prefix)

    @property
    def blocks(self) -> dict[str, list[list[int]]] | None:
        blocks = {name: list(map(list, x.blocks)) for name, x in self.partitions.items()}
        return blocks if any(blocks.values()) else None

    def names(self, name: str, size: int = 1) -> list[str]:
        """Return the names of the parameters of the sets of ``size`` weights of a site."""
        if size == 1:
            return self.singles.names(name)
        return [f"{name}_{self.prefix}_{part}_{size}" for part in SetFactors._fields]

    def start(self, pair: Pair, scale: Any) -> Start:
        partition = self.partitions[pair.name]
        single_scale, scales = partition.cut(jnp.ravel(scale), fill=1.0)
        # without sets parameters have the shape of the weights
        start = self.singles.start(pair, single_scale if partition.stacks else scale)
        for ((S, b), stack), scale in zip(partition.stacks.items(), scales, strict=True):
            linear, tril = prior_slabs(scale)
            uniform = jnp.full((len(stack.members), S), 1 / S, scale.dtype)
            starts = (
                (uniform, constraints.simplex),
                (linear, constraints.real),
                (tril, constraints.lower_cholesky),
            )
            start |= dict(zip(self.names(pair.name, b), starts, strict=True))
        return start

    def sample(
        self, pair: Pair, start: Start, prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        partition = self.partitions[pair.name]
        params = dict(zip(start, declared(start), strict=True))
        single_scale, scales = partition.cut(jnp.ravel(prior_scale), fill=1.0)
        draws = [self._sample_singles(pair, params, single_scale)]
        density = jnp.zeros(())
        for (stack, factors), scale in zip(self._stacks(pair, params), scales, strict=True):
            b = stack.members.shape[1]
            # in single precision a sum of hundreds of probabilities differs from 1 by over 1e-6
            choice = dist.Categorical(probs=factors.patterns, validate_args=False)
            spikes = jnp.asarray(stack.patterns)[self._auxiliary(pair, f"patterns_{b}", choice)]
            mean, tril = slabs_given(factors, spikes, scale)
            normal = dist.MultivariateNormal(mean, scale_tril=tril)
            slabs = self._auxiliary(pair, f"slabs_{b}", normal)
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

    def _sample_singles(self, pair: Pair, params: dict[str, Any], prior_scale: Any) -> Any:
        probs, loc, scale = (jnp.ravel(params[key]) for key in self.names(pair.name))
        spike = self._auxiliary(pair, "spikes", dist.Bernoulli(probs=probs))
        normal = dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
        return spike.astype(loc.dtype), self._auxiliary(pair, "slabs", normal)

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
        parts = (jnp.ravel(params[key]) for key in self.names(pair.name))
        marginals: Marginals = [(self.partitions[pair.name].singles, single(*parts))]
        for stack, factors in self._stacks(pair, params):
            marginals.append((stack.members.ravel(), stack_mixtures(factors, stack.patterns)))
        return marginals

    def _stacks(self, pair: Pair, params: dict[str, Any]) -> Iterator[tuple[Stack, SetFactors]]:
        for (_, b), stack in self.partitions[pair.name].stacks.items():
            patterns, linear, tril = (params[key] for key in self.names(pair.name, b))
            # gradients may have moved the padding
            is_real = stack.members < pair.size
            linear = jnp.where(is_real, linear, 0)
            tril = jnp.where(is_real[:, :, None] & is_real[:, None], tril, jnp.eye(b))
            yield stack, SetFactors(patterns, linear, tril)

    def pack(self, form: Form, params: dict[str, Any]) -> PatternMeanField:
        check_columns(form)
        partition = joined(tuple(self.partitions[pair.name] for pair in form.pairs))
        singles = (form.join(params, name) for name in self.names("{}"))
        stacks: dict[Any, list[SetFactors]] = {key: [] for key in partition.stacks}
        for pair in form.pairs:
            for stack, factors in self._stacks(pair, params):
                stacks[stack.patterns.shape].append(factors)
        joint = [
            SetFactors(*map(jnp.concatenate, zip(*parts, strict=True))) for parts in stacks.values()
        ]
        return PatternMeanField.of(partition, PairedMeanField(*singles), joint)

    def unpack(self, pairs: Sequence[Pair], family: PatternMeanField) -> dict[str, Any]:
        joint: dict[Any, Any] = dict(zip(family.partition.stacks, family.stacks, strict=True))
        joint[2, 1] = family.singles
        params: dict[str, Any] = {}
        used: Counter = Counter()
        for pair in pairs:
            partition = self.partitions[pair.name]
            counts = {key: len(stack.members) for key, stack in partition.stacks.items()}
            counts[2, 1] = len(partition.singles)
            for key, count in counts.items():
                for name, x in zip(self.names(pair.name, key[1]), joint[key], strict=True):
                    params[name] = x[used[key] : used[key] + count]
                used[key] += count
            if not partition.stacks:
                params |= {name: params[name].reshape(pair.shape) for name in self.names(pair.name)}
        return params
