# SPDX-License-Identifier: Apache-2.0
r"""The evidence of a model, from finished chains.

The first halves of the chains teach a proposal; their second halves and draws from it are bridged
(:mod:`numpyro_spikeslab.algebra.bridge`). A state is the spikes s, the unconstrained values x of
other sites, and u, the included slabs and the coefficients in standard deviations of their priors.
These are proposed from their conditional :math:`g(u \mid s, x)` under a Normal likelihood, or under
a Gaussian in place of another one, which draws teach. Under a Normal likelihood the joint density
divided by :math:`g(u \mid s, x)` is the same at any u: they are integrated out.
"""

from math import prod
from typing import Any, NamedTuple
import warnings

from arviz_stats.base import array_stats
from jaxtyping import Array, Float, Int
import numpy as np
from scipy.special import expit

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.bridge import NormalProposal, SpikeProposal, bridge, log_probability
from numpyro_spikeslab.algebra.pair_metropolis import LearntMoments
from numpyro_spikeslab.reading.coefficient_rows import standardised
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import double_precision, full_precision
from numpyro_spikeslab.support.priors import base_of

USER = "log_evidence"

MAX_DRAWS = 1000
"""Draws of all chains that are bridged, and that teach the Gaussian."""

BATCH = 2**20
"""Numbers that are computed at once, which bounds the memory."""

MIN_OVERLAP, MAX_SE, MAX_R_HAT = 0.05, 0.5, 1.05
"""Where warnings begin."""

UNDECIDED = 0.02
"""Share of draws with either value from which R-hat of a spike counts."""


class Evidence(NamedTuple):
    """The log evidence of a model, in nats, and how far it can be trusted.

    - **value** - the log evidence.
    - **se** - its standard error, provided that the chains have visited all modes.
    - **lower**, **upper** - enclose the log evidence in expectation: means of the log ratio of
      joint density and proposal over the proposal and over the posterior.
    - **overlap** - of proposal and posterior, 1 if they are the same, 0 if they are disjoint.

    Without a proposal the last three are NaN.
    """

    value: float
    se: float
    lower: float = np.nan
    upper: float = np.nan
    overlap: float = np.nan


class Draws(NamedTuple):
    """Draws, with axes for chains and draws in front, or one for both, or one draw.

    - **x** - unconstrained values of all sites but pairs and coefficients, joined.
    - **spikes** - of all pairs, joined.
    - **slabs** - of all weights, joined.
    - **z** - coefficients by site.
    """

    x: Any
    spikes: Any
    slabs: Any
    z: dict[str, Any]

    def part(self, *ends: int | None) -> "Draws":
        """Return a part of each chain, all in one row."""
        return jax.tree.map(lambda x: np.concatenate(x[:, slice(*ends)]), self)


@full_precision
def evidence_of(
    key: Array, model: Any, samples: Any, args: tuple, kwargs: dict[str, Any], num_proposals: int
) -> Evidence:
    """Compute :func:`~numpyro_spikeslab.log_evidence`."""
    rng = np.random.default_rng(np.asarray(random.bits(key, (4,))))
    with double_precision():
        joint = Joint.of(Reader(model, USER)(args, kwargs), samples)
        draws = joint.draws(samples)
        chains, size = draws.spikes.shape[:2]
        half, step = size // 2, -(-chains * size // (2 * MAX_DRAWS))
        ratios = joint.log_ratios(rng, draws, (half, step), num_proposals)
    at_draws, at_proposals = ratios[:-num_proposals].reshape(chains, -1), ratios[-num_proposals:]
    if not np.isfinite(at_draws).all():
        expected = "draws from the posterior of this model given these arguments"
        raise bad(f"{USER}: posterior_samples", "draws of density 0", expected)
    # a density that is not a number is one of 0
    at_proposals = np.where(np.isnan(at_proposals), -np.inf, at_proposals)
    value, *terms = bridge(at_draws, at_proposals)
    sizes = min(float(array_stats.ess(terms[0], method="mean")), at_draws.size), num_proposals
    # Frühwirth-Schnatter, 2004, Estimating marginal likelihoods for mixture and Markov switching
    # models
    se = sum(x.var() / x.mean() ** 2 / size for x, size in zip(terms, sizes, strict=True)) ** 0.5
    overlap = expit(value - at_draws).mean() + expit(at_proposals - value).mean()
    evidence = Evidence(value, *map(float, (se, at_proposals.mean(), at_draws.mean(), overlap)))
    _warn(evidence, draws)
    return evidence


class Joint(NamedTuple):
    """The joint density of a model and its data.

    - **coefficients** - names of those that are proposed with the slabs.
    - **maps** - from real numbers to the supports of all other sites.
    - **split** - from x to real numbers by site.
    - **firsts**, **owners** - of each spike the first weight, of each weight the spike.
    """

    reading: Reading
    coefficients: tuple[str, ...]
    maps: dict[str, Any]
    split: Any
    firsts: Int[np.ndarray, " G"]
    owners: Int[np.ndarray, " P"]

    @classmethod
    def of(cls, reading: Reading, samples: Any) -> "Joint":
        """Check a model and its samples.

        :raises ValueError: if there is no evidence, or draws are missing.
        """
        form, start, numbers = reading.form, 0, {}
        _refuse(reading)
        _check_samples(reading, samples)
        # coefficients that tasks share are among the other sites
        names = form.coefficients if form.is_design else [each.site for each in form.of_tasks]
        supports = reading.supports_of([name for name in form.others if name not in names])
        if unfit := [name for name, support in supports.items() if support is None]:
            remedy = "Make it a function of another site, such as `low + above`."
            got = "a support that depends on other sites"
            raise bad(f"{USER}: the model: {unfit[0]!r}", got, "one that does not", remedy)
        maps = {name: biject_to(supports[name]) for name in sorted(supports)}
        split = ravel_pytree({name: to.inv(reading.generic[name]) for name, to in maps.items()})[1]
        for pair in form.pairs:
            shape = pair.shapes[pair.spike]
            numbers[pair.spike] = start + np.arange(prod(shape)).reshape(shape)
            start += prod(shape)
        owners = np.asarray(form.join_spikes(numbers))
        firsts = np.unique(owners, return_index=True)[1]
        return cls(reading, tuple(names), maps, split, firsts, owners)

    def draws(self, samples: dict[str, Any]) -> Draws:
        """Return samples as draws."""
        pairs, arrays = self.reading.form.pairs, jax.tree.map(np.asarray, dict(samples))
        lead = arrays[pairs[0].spike].shape[:2]

        def join(parts):
            # there may be no parts
            rows = [np.zeros((*lead, 0)), *(np.reshape(x, (*lead, -1)) for x in parts)]
            return np.concatenate(rows, axis=-1)

        x = join(to.inv(jnp.asarray(arrays[name], float)) for name, to in self.maps.items())
        spikes, slabs = (join(arrays[getattr(p, k)] for p in pairs) for k in ("spike", "slab"))
        return Draws(x, spikes > 0, slabs, {name: arrays[name] for name in self.coefficients})

    def values(self, x: Float[Array, " D"]) -> dict[str, Any]:
        """Return values of sites."""
        parts = self.split(x)
        return self.reading.generic | {name: to(parts[name]) for name, to in self.maps.items()}

    def log_ratios(
        self, rng: np.random.Generator, draws: Draws, cut: tuple[int, int], num_proposals: int
    ) -> Float[np.ndarray, " S"]:
        """Compute log ratios of the joint density and a proposal, at draws and then at proposals.

        :param cut: the draw at which second halves of chains begin, and the step between draws.
        """
        half, step = cut
        first, second = draws.part(0, half), draws.part(half, None, step)
        try:
            normal = NormalProposal.of(first.x)
        except np.linalg.LinAlgError as error:
            got, names = "a site that stays, or depends on others", list(self.maps)
            expected = f"draws in which all of {names} vary, each for itself"
            raise bad(f"{USER}: posterior_samples", got, expected) from error
        x = np.concatenate([second.x, normal.draw(rng, num_proposals)])
        odds = self.log_odds(np.concatenate([x, normal.mean[None]]))
        proposal, odds = SpikeProposal.of(first.spikes, odds[-1]), odds[:-1]
        spikes = np.concatenate([second.spikes, proposal.draw(rng, odds[len(second.x) :])])
        ratios = log_probability(spikes, odds).sum(axis=1)
        ratios -= normal.log_density(x) + proposal.log_density(spikes, odds)
        # slabs and coefficients of proposals do not matter
        both = jax.tree.map(lambda old: old[np.arange(len(x)) % len(old)], second)
        both = both._replace(x=x, spikes=spikes)
        stand_in = self.stand_in(draws.part(0, half, step))
        return ratios + self.ratios_given(rng, both, len(second.x), stand_in)

    def log_odds(self, x: Float[np.ndarray, "S D"]) -> Float[np.ndarray, "S G"]:
        """Compute the prior log odds of the spikes."""
        problem, form = self.reading.problem, self.reading.form

        def one(x):
            pairs = problem.run(self.values(x), of=lambda run: run.pairs)
            log_odds = [jnp.ravel(pairs[pair.name].log_odds) for pair in form.pairs]
            return jnp.concatenate(log_odds)[self.firsts]

        return np.asarray(compiled(jax.vmap(one), jnp.asarray(x), once=True))

    def stand_in(self, draws: Draws) -> StandIn | None:
        """Return the Gaussian of each observation that draws teach; `None` under a Normal
        likelihood."""
        problem, form = self.reading.problem, self.reading.form
        if form.likelihood.is_fixed:
            return None

        def turn(moments, draw):
            now = Current.of(self.reading, self.values(draw.x) | draw.z, {})
            weights = form.split(draw.spikes[self.owners] * draw.slabs, "{}")
            f = problem.predictor(now.values, weights)
            density = now.likelihood(f).log_density
            slope = jax.jvp(density, (f,), (jnp.ones_like(f),))[1]
            return moments.updated(f, slope), None

        def learn(draws):
            f = jnp.zeros(problem.observations(problem.program.shapes).value.shape)
            return lax.scan(turn, LearntMoments.zero(f), draws)[0].stand_in()

        return compiled(learn, draws)

    def ratios_given(
        self, rng: np.random.Generator, draws: Draws, number: int, stand_in: StandIn | None
    ) -> Float[np.ndarray, " S"]:
        """Compute log ratios of all but the spikes and the proposal of slabs and coefficients given
        x and the spikes, which are drawn behind the first ``number`` draws."""
        form, S = self.reading.form, len(draws.x)
        spikes = draws.spikes[:, self.owners].reshape(S, *form.shape)
        # programs are shared by numbers that round to the same
        most = max(16, 1 << (int(spikes.sum(axis=-1).max()) - 1).bit_length())
        included = np.argsort(~spikes, axis=-1, kind="stable")[:, :, :most]
        slabs = np.take_along_axis(draws.slabs.reshape(spikes.shape), included, axis=-1)
        takes = np.take_along_axis(spikes, included, axis=-1)
        rest = sum(x[0].size for x in draws.z.values()) // form.num_tasks
        noise = rng.standard_normal((S, form.num_tasks, included.shape[-1] + rest))
        parts = draws._replace(slabs=slabs, spikes=takes), included, noise, np.arange(S) < number
        batch = max(1, min(64, BATCH // (noise[0].size * form.num_obs)))
        # JAX would compile another program for a last, smaller batch
        index = np.arange(-(-S // batch) * batch) % S
        parts = jax.tree.map(lambda x: jnp.asarray(x[index]), parts)

        def many(parts):
            return lax.map(lambda part: self._ratio(stand_in, *part), parts, batch_size=batch)

        return np.asarray(compiled(many, parts, once=True))[:S]

    def _ratio(
        self, stand_in: StandIn | None, draw: Draws, included: Any, noise: Any, is_given: Any
    ) -> Float[Array, ""]:
        """Compute :meth:`ratios_given` of one draw, which has the spikes and slabs of the weights
        of each task that are ``included``, and of some others."""
        reading, form, z = self.reading, self.reading.form, draw.z
        now = Current.of(reading, self.values(draw.x) | z, z)
        if stand_in is not None:
            now = now.with_stand_in(now.observed.for_one(stand_in))
        at, most = now.at, included.shape[-1]
        sd = jnp.broadcast_to(jnp.sqrt(at.prior.variance), form.shape)
        sd = draw.spikes * jnp.take_along_axis(sd, included, axis=1)
        features = reading.rows_at(now.values) if form.is_design else reading.features
        precision = jnp.broadcast_to(at.precision, at.Y.shape).T
        J, u = features[included] * sd[:, :, None], jnp.where(sd > 0, draw.slabs / sd, 0)
        if z:
            standard = standardised(form.coefficient_sites(z), at, now.values)
            J = jnp.concatenate([J, standard.prior.rows(now.covariates)], axis=1)
            u = jnp.concatenate([u, standard.prior.deviation], axis=1)
        # rows may be NaN where nothing is observed
        J = jnp.where(precision[:, None] > 0, J, 0)
        # the residual is that at the current coefficients
        target = at.Y.T + jnp.einsum("qkn,qk->qn", J[:, most:], u[:, most:])
        root = jnp.linalg.cholesky(jnp.eye(J.shape[1]) + J * precision[:, None] @ J.swapaxes(1, 2))
        half = solve_triangular(root, J @ (precision * target)[:, :, None], lower=True)
        whitened = root.swapaxes(1, 2) @ u[:, :, None] - half
        whitened = jnp.where(is_given, whitened, noise[:, :, None])
        drawn = solve_triangular(root, half + whitened, lower=True, trans=1)[:, :, 0]
        u = jnp.where(is_given, u, drawn)
        w = jnp.zeros(form.shape).at[jnp.arange(len(u))[:, None], included].set(sd * u[:, :most])
        new = standard.values(u[:, most:]) if z else {}
        weights = form.split(jnp.ravel(w), "{}")
        log_probs = reading.problem.run(now.values | new, weights, of=lambda run: run.log_probs)
        log_ratio = sum(x for name, x in log_probs.items() if name not in z)
        log_ratio += 0.5 * (jnp.sum(whitened**2) - jnp.sum(u**2))
        log_ratio -= jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)))
        for name, part in self.split(draw.x).items():
            to = self.maps[name]
            log_ratio += jnp.sum(to.log_abs_det_jacobian(part, now.values[name]))
        return log_ratio


def _refuse(reading: Reading) -> None:
    """Refuse models whose evidence is not computed from chains."""
    check_priors(USER, reading)
    form, what = reading.form, f"{USER}: the model"
    if form.functions is not None or form.sparse:
        got = "entries of a sparse table" if form.sparse else "latent functions"
        remedy = "Of latent functions take `tempered_evidence`, which needs no chains."
        raise bad(what, got, "known features and a dense table", remedy)


def check_priors(user: str, reading: Reading) -> None:
    """Refuse traced data, and models whose sites other than spikes lack a proper density."""
    form, what = reading.form, f"{user}: the model"
    if not are_concrete(reading.problem.constants):
        raise bad(f"{user}: the data", "tracers, as within jit or vmap", "arrays")
    for name in form.others:
        fn = base_of(reading.trace.sites[name].get("fn"))
        if not isinstance(fn, dist.Distribution) or isinstance(fn, dist.ImproperUniform):
            got = "a param, or an improper prior"
            raise bad(f"{what}: {name!r}", got, "a proper prior, or the evidence is arbitrary")
        if fn.support.is_discrete:
            remedy = "Sum it out."
            raise bad(f"{what}: {name!r}", "a discrete site", "none but spikes", remedy)


def _check_samples(reading: Reading, samples: Any) -> None:
    """Refuse samples that lack sites or chains."""
    form, what = reading.form, f"{USER}: posterior_samples"
    shapes = {name: jnp.shape(reading.generic[name]) for name in form.others}
    shapes |= {name: shape for pair in form.pairs for name, shape in pair.shapes.items()}
    lead = np.shape(samples.get(form.pairs[0].spike))[:2]
    for name, shape in shapes.items():
        got = np.shape(samples[name]) if name in samples else None
        if got != (*lead, *shape) or len(lead) < 2:
            expected = f"(chains, draws, {', '.join(map(str, shape))})"
            remedy = "Give `mcmc.get_samples(group_by_chain=True)`."
            raise bad(f"{what}[{name!r}]", f"the shape {got}", expected, remedy)
    least = max(20, 4 * sum(prod(shapes[name]) for name in form.others))
    if lead[1] < 10 or prod(lead) < least:
        expected = f"10 or more of each, and {least} or more of all"
        raise bad(what, f"{lead[1]} draws of {lead[0]} chains", expected)


def _warn(evidence: Evidence, draws: Draws) -> None:
    """Warn if chains disagree, or if the proposal is far from the posterior."""
    probs = draws.spikes.mean(axis=(0, 1))
    undecided = draws.spikes[..., (probs > UNDECIDED) & (probs < 1 - UNDECIDED)]
    series = np.concatenate([draws.x, undecided], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        r_hats = np.nan_to_num(array_stats.rhat(series, chain_axis=0, draw_axis=1))
    worst = np.max(r_hats, initial=0)
    doubts = [f"R-hat is {worst:.2f}, so chains may lack modes"] if worst > MAX_R_HAT else []
    if evidence.overlap < MIN_OVERLAP:
        doubts.append(f"proposal and posterior overlap by {evidence.overlap:.2f} only")
    if evidence.se > MAX_SE:
        doubts.append(f"the standard error is {evidence.se:.2f}")
    if doubts:
        warnings.warn(f"{USER}: {'; '.join(doubts)}. Draw longer chains.", stacklevel=5)
