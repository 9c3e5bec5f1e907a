# SPDX-License-Identifier: Apache-2.0
"""The fit and the chains of a regression on a standardised table."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
import warnings

import arviz_base
from jaxtyping import Array, Float
import numpy as np
import pandas as pd
from tqdm.auto import tqdm
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import NUTS, CustomGibbs, Gibbs

from numpyro_spikeslab import models
from numpyro_spikeslab.algebra.heredity import Heredity
from numpyro_spikeslab.fitting.cavi import CAVI
from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.fitting.posterior import strong
from numpyro_spikeslab.fitting.run import STILL
from numpyro_spikeslab.fitting.variational import FitStatistics, log_densities
from numpyro_spikeslab.models.responses import RESPONSES, ROUNDING, ResponseKind
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.sampling.paired_gibbs import PairedGibbs
from numpyro_spikeslab.support.compiled import give_back, kept_jit
from numpyro_spikeslab.support.precision import full_precision
from numpyro_spikeslab.support.priors import base_of
from numpyro_spikeslab.tables.checks import check_key, checked_count
from numpyro_spikeslab.tables.monte_carlo import PROBABILITIES, monte_carlo_errors

NUM_STEPS, TOLERANCE = 1000, 1e-3
"""Most steps of the fit, and the rise of the bound, in nats, at which it stops."""

NUM_FIT_DRAWS = 1000
"""Draws of the fit, or as many as there are chains."""

START = 0.5
"""Standard deviation of random effects of a fit, in standard units."""

ROUND, MOST = 250, 1000
"""Draws of a chain between looks at Monte Carlo errors, and at most, unless their number is given.
"""

WIDE = 4096
"""Columns above which draws are stored in single precision, and spikes in a byte."""

SHORT = 300_000
"""Steps of all chains times columns, up to which code without XLA's optimisations is faster."""


class Run(NamedTuple):
    """A random key, numbers of warm-up steps, draws and chains, and whether to show a progress bar.

    Chains that may stop do so when Monte Carlo errors are small; their draws are as many at most.
    """

    key: Array
    warmup: int
    samples: int
    chains: int
    may_stop: bool
    progress_bar: bool

    @classmethod
    def checked(cls, kind: ResponseKind, *given: Any) -> "Run":
        """Check arguments of a regression; numbers of steps and draws may be `None`."""
        key, warmup, samples, chains, progress_bar = given
        check_key(key)
        return cls(
            key,
            checked_count("num_warmup", kind.warmup if warmup is None else warmup, 0),
            checked_count("num_samples", MOST if samples is None else samples, 1),
            checked_count("num_chains", chains, 1),
            samples is None,
            progress_bar,
        )


class TableModel(NamedTuple):
    """The static arguments of compiled code for a regression."""

    kind: ResponseKind
    groups: tuple[int, ...] | None
    heredity: Heredity | None

    def __repr__(self) -> str:
        # the name stands for the functions of the kind
        return repr((self.kind.name, self.kind.size, self.groups, self.heredity))

    def num_spikes(self, num_columns: int) -> int:
        return num_columns if self.groups is None else max(self.groups) + 1

    def at(self, prior: dict[str, Any]) -> Callable[..., Any]:
        """Return the model of a transposed table, with ``inclusion`` or ``probabilities``.

        XLA would transpose a table in each step.
        """
        name, num_levels = self.kind.name, self.kind.size
        options = {"groups": self.groups, "heredity": self.heredity} | prior
        model = models.sparse_regression(likelihood=name, num_levels=num_levels, **options)
        return lambda columns, **data: model(columns.T, **data)


class Table(NamedTuple):
    """The arguments of compiled code, padded to a size that tables of like shapes share.

    Padding rows are masked. Padding columns are zero: the data leave their weights to the prior, so
    the posterior of all else is the same.

    - **columns** - P columns of N rows each.
    - **data** - other arguments of the model, by name.
    - **prior** - of inclusion, see :meth:`TableModel.at`.
    - **start** - of chains without weights, where there is no fit; `None` if there is one.
    """

    columns: Float[Array | np.ndarray, "P N"]
    data: dict[str, Any]
    prior: dict[str, Any]
    start: dict[str, Any] | None

    @classmethod
    def of(
        cls, model: TableModel, data: dict[str, Any], prior: dict[str, Any]
    ) -> tuple["Table", TableModel]:
        """Pad arguments of :func:`~numpyro_spikeslab.models.sparse_regression`."""
        X, dtype = data["X"], jnp.result_type(float)
        # what weights mean is settled, so estimators and functions share programs
        kind = RESPONSES[model.kind.name]._replace(size=model.kind.size)
        model = model._replace(kind=kind)
        num_rows = padded(len(X)) - len(X)
        # a term has few columns, and none of padding
        num_columns = (padded(X.shape[1]) - X.shape[1]) * (model.heredity is None)
        # nothing is known of a time of padding, so its density has slopes
        fills = {"count": 1.0, "upper": np.inf}
        others = {name: x for name, x in data.items() if name != "X"}

        def to_size(path: Any, x: Any) -> Any:
            of_rows = path[0].key != "breaks"
            return _longer(np.asarray(x, dtype), of_rows * num_rows, fills.get(path[0].key, 0.0))

        data = jax.tree.map_with_path(to_size, others)
        data["mask"] = np.arange(len(X) + num_rows) < len(X)
        columns = _longer(_longer(X, num_rows).T, num_columns).astype(dtype)
        if model.groups is not None:
            first = model.num_spikes(X.shape[1])
            model = model._replace(groups=(*model.groups, *range(first, first + num_columns)))
        if "probabilities" in prior:
            # any will do
            prior = {"probabilities": _longer(prior["probabilities"], num_columns, 0.01)}
        start, offset = model.kind.start, data.get("offset", np.zeros_like(data["y"]))
        count = data["mask"] * data.get("count", 1.0)
        at = None if start is None else start(data["y"], offset, count)
        if "background" in data:
            # a mean field fit takes few columns beside a background; each has half the variance
            at = dict.fromkeys(("sigma", "background_scale"), 0.5**0.5)
        return cls(columns, data, prior, at), model


def _longer(x: Any, number: int, fill: float = 0.0) -> np.ndarray:
    """Append so many rows to a numpy array."""
    return np.pad(x, [(0, number), *[(0, 0)] * (np.ndim(x) - 1)], constant_values=fill)


def padded(size: int) -> int:
    """Round up to one of four sizes in each octave, from eight on."""
    step = max(2, 1 << max(0, (size - 1).bit_length() - 3))
    return max(8, -(-size // step) * step)


Fit = tuple[dict[str, Any], FitStatistics, Any]
"""A fit as arrays: draws, their statistics, and the last two bounds."""


@partial(kept_jit, static_argnums=(1, 3, 4), compiler_options=RUN_ONCE)
@full_precision
def _begin(
    key: Array, model: TableModel, table: Table, num_warmup: int, num_chains: int
) -> tuple[Fit | None, list[Any], Array]:
    """Fit by CAVI, draw from the fit, and start chains at draws: all in one program.

    :return: the fit, if there is one, the states at which chains start, and other random bits.
    """
    key_draws, key_chains, key_seed, key_fit = random.split(key, 4)
    fitted: Fit | None = None
    if table.start is None:
        # spikes of a guide are independent, so under heredity this is a start and no more
        size = max(NUM_FIT_DRAWS, num_chains)
        fitted = _fit((key_fit, key_draws), model._replace(heredity=None), table, size)
        # all but the weights, which are products of slabs and spikes
        starts = {k: x[:num_chains] for k, x in fitted[0].items() if k != "w"}
        starts |= {name: jnp.full(num_chains, x) for name, x in _scales(table).items()}
        fitted = _stored(fitted[0]), *fitted[1:]
    else:
        spikes = jnp.zeros(model.num_spikes(len(table.columns)), int)
        one = {**table.start, "w_spike": spikes}
        own = model.kind.own_sites
        one |= {name: jnp.ones(own[name].event_shape) for name in model.kind.free_sites}
        if "always" in table.data:
            one["always"] = jnp.zeros(table.data["always"].shape[1])
        effects = table.data.get("effects", {}).items()
        one |= {f"effect_{name}": jnp.zeros(x.shape[1]) for name, x in effects} | _scales(table)
        starts = jax.tree.map(lambda x: jnp.stack([x] * num_chains), one)
    kernel = _kernel(model, table)
    if model.kind.draw is None:
        # NUTS starts at unconstrained values
        priors = model.kind.own_sites
        free = {name: biject_to(priors[name].support) for name in model.kind.free_sites}
        starts |= {name: transform.inv(starts[name]) for name, transform in free.items()}

    def start(inputs):
        key, values = inputs
        return kernel.init(key, num_warmup, values, (table.columns,), table.data)

    states = strong(jax.lax.map(start, (random.split(key_chains, num_chains), starts)))
    each = [jax.tree.map(lambda x, k=k: x[k], states) for k in range(num_chains)]
    return fitted, each, random.bits(key_seed, (2,))


def _fit(keys: Any, model: TableModel, table: Table, size: int) -> Fit:
    (key_fit, key_draws), (columns, data, prior, _) = keys, table
    start = {}
    if "inclusion" in prior:
        # below 1 the density of the probability has no maximum
        one, other = (jnp.maximum(x, 1.0) for x in prior["inclusion"])
        # a guide starts at the prior mean, which it cannot compute from traced concentrations
        prior, start = {"inclusion": (one, other)}, {"inclusion_auto_loc": one / (one + other)}
    # at a point, as effects are in a fit, their scale would fall to 0
    guide = PairedGuide(handlers.condition(model.at(prior), _scales(table)))
    svi = CAVI(guide.model, guide)
    # all rows count where masks are traced
    tol = TOLERANCE / columns.shape[1]
    options: dict[str, Any] = {"tol": tol, "progress_bar": False, "init_params": start}
    result = svi.run(key_fit, NUM_STEPS, columns, **options, **data)
    params = result.params
    draws = guide.sample_posterior(key_draws, params, columns, sample_shape=(size,), **data)
    latents = {name: x for name, x in draws.items() if name != "w"}
    latents |= guide.auxiliary_values(latents)
    densities = log_densities(svi, params, latents, (columns,), data)
    probs, effects = guide.inclusion_probabilities(params), guide.effects(params, columns, **data)
    return draws, FitStatistics(*densities, probs, effects), -result.losses[-2:]


def _scales(table: Table) -> dict[str, Any]:
    """Return the scales of random effects at which chains start, and which a fit takes as known."""
    return {f"sd_{name}": jnp.asarray(START) for name in table.data.get("effects", {})}


def _stored(draws: dict[str, Any]) -> dict[str, Any]:
    """Leave out the slabs, which are weights or say nothing, and round draws of many columns."""
    kept = {name: x for name, x in draws.items() if name != "w_slab"}
    if draws["w"].shape[-1] > WIDE:
        types = {"w": jnp.float32, "w_spike": jnp.int8, PROBABILITIES: jnp.float32}
        kept = {name: x.astype(types.get(name, x.dtype)) for name, x in kept.items()}
    return kept


def _kernel(model: TableModel, table: Table) -> Any:
    """Return the kernel of a chain."""
    program, free = model.at(table.prior), model.kind.free_sites
    kernel = PairedGibbs(program)
    if not free:
        return kernel

    draw_sites = model.kind.draw
    if draw_sites is None:
        return Gibbs([(kernel, None), (NUTS(program), free)])

    def draw(rng_key: Array, gibbs_sites: dict[str, Any], hmc_sites: dict[str, Any]) -> Any:
        given = handlers.substitute(program, hmc_sites | gibbs_sites)
        site = handlers.trace(given).get_trace(table.columns, **table.data)["y"]
        count = table.data["mask"] * table.data.get("count", 1.0)
        return draw_sites(rng_key, base_of(site["fn"]), site["value"], count)

    return Gibbs([(kernel, None), (CustomGibbs(draw), free)])


def _steps(
    state: Any, num_steps: Any, model: TableModel, table: Table, num_warmup: int | None
) -> tuple[Any, dict[str, Any]]:
    """Make at most a round of steps of a chain.

    :param num_warmup: `None` without NUTS; it is static, so each value compiles a program.
    :return: the new state, and the draws of a whole round, zero after the last step.
    """
    arguments = (table.columns,), table.data
    kernel = _kernel(model, table)
    if num_warmup is not None:
        # what NUTS computes here is not used, but it samples only after this call
        kernel.init(random.key(0), num_warmup, None, *arguments)
    finish = kernel.postprocess_fn(*arguments)

    def collected(state):
        pairs = state if num_warmup is None else state.block_states[0]
        return _stored(finish(state.z) | {PROBABILITIES: pairs.inclusion_probabilities["w"]})

    def step(k, carry):
        state, draws = carry
        state = kernel.sample(state, *arguments)
        return state, jax.tree.map(lambda x, new: x.at[k].set(new), draws, collected(state))

    like = jax.eval_shape(collected, state)
    draws = jax.tree.map(lambda x: jnp.zeros((ROUND, *x.shape), x.dtype), like)
    return jax.lax.fori_loop(0, num_steps, step, (state, draws))


_advance = kept_jit(full_precision(_steps), (2, 4))
_advance_short = kept_jit(full_precision(_steps), (2, 4), compiler_options=RUN_ONCE)


def fit_and_chains(
    run: Run, model: TableModel, data: dict[str, Any], prior: dict[str, Any], columns: pd.Series
) -> tuple[Any, xr.DataTree | None, xr.DataTree]:
    """Return a seed, draws of a fit if there is one, and draws of chains that start there.

    Warn if Monte Carlo errors are large at the end.

    :param data: arguments of :func:`~numpyro_spikeslab.models.sparse_regression`, of numpy.
    :param columns: names of the columns that vary, by their place.
    """
    num_columns = data["X"].shape[1]
    sizes = dict.fromkeys(("w", PROBABILITIES), num_columns)
    sizes["w_spike"] = model.num_spikes(num_columns)
    table, model = Table.of(model, data, prior)
    total = run.warmup + run.samples
    is_short = run.chains * total * len(table.columns) <= SHORT
    advance = _advance_short if is_short else _advance
    fixed = model, table, run.warmup if model.kind.free_sites else None
    arguments = run.key, model, table, run.warmup, run.chains
    with tqdm(desc="compiling", total=total, disable=not run.progress_bar) as bar:
        first = _begin.eval_shape(*arguments)[1][0]
        programs = _begin.lower(*arguments), advance.lower(first, 0, *fixed)
        with ThreadPoolExecutor() as pool:
            # side by side, for XLA lets other threads run
            begin, steps = pool.map(lambda program: program.compile(), programs)
        if num_columns > WIDE:
            give_back()
        bar.set_description("fit")
        fitted, states, seed = jax.block_until_ready(begin(run.key, table))
        of_fit = None
        if fitted is not None:
            is_start = model.heredity is not None
            # copied, for units are changed in place
            fitted = jax.tree.map(np.array, fitted)
            of_fit = _tree_of_fit(fitted, sizes, only_starts=is_start)
        joined, errors = _sample(
            run, states, lambda state, size: steps(state, size, table), bar, columns
        )
    if "sigma" in model.kind.free_sites and not (joined["sigma"] > ROUNDING).all():
        raise FloatingPointError(
            "sparse_regression: sigma falls to 0, where columns fit most responses exactly, such as"
            " equal ones within a level. Regress whether a response is one of these by "
            "likelihood='logit', and the other rows alone."
        )
    if errors.max() > 1:
        text = f"the Monte Carlo error of {errors.idxmax()} is {errors.max():.2f} times"
        end = f"that at which chains stop, after {joined['w'].shape[1]} draws. Raise num_samples."
        # of the caller, past the decorator
        warnings.warn(f"sparse_regression: {text} {end}", stacklevel=5)
    return np.asarray(seed), of_fit, _tree(joined, sizes, ["chain", "draw"])


def _sample(
    run: Run, states: list[Any], advance: Callable[..., Any], bar: Any, columns: pd.Series
) -> tuple[dict[str, Any], pd.Series]:
    """Draw until Monte Carlo errors are small, or chains have all their draws; return both.

    A progress bar shows the largest error so far.
    """
    bar.set_description("warm-up")
    for size in _rounds(run.warmup):
        states = [advance(state, size)[0] for state in states]
        if run.progress_bar:
            jax.block_until_ready(states)
        bar.update(size)
    bar.set_description("draws")
    joined: dict[str, Any] = {}
    done = 0
    for size in _rounds(run.samples):
        # all are dispatched before the first is waited for, so cores share them
        ends = [advance(state, size) for state in states]
        states = [state for state, _ in ends]
        if not joined:
            # in one piece, for to join rounds at the end would take twice the memory
            shape = run.chains, run.samples
            joined = {k: np.empty((*shape, *x.shape[1:]), x.dtype) for k, x in ends[0][1].items()}
        for k in range(run.chains):
            for name, x in ends.pop(0)[1].items():
                joined[name][k, done : done + size] = np.asarray(x)[:size]
        done += size
        so_far = {name: x[:, :done] for name, x in joined.items()}
        if run.may_stop or run.progress_bar or done == run.samples:
            errors = monte_carlo_errors(so_far, columns)
            bar.set_postfix(error=f"{errors.max():.2f}", refresh=False)
        bar.update(size)
        if run.may_stop and errors.max() <= 1:
            break
    # also where chains have stopped, the bar is full
    bar.total = bar.n
    bar.refresh()
    return so_far, errors


def _rounds(total: int) -> list[int]:
    return [min(ROUND, total - start) for start in range(0, total, ROUND)]


def _tree_of_fit(fitted: Fit, sizes: dict[str, int], only_starts: bool) -> xr.DataTree | None:
    """Make the ArviZ data of :func:`~numpyro_spikeslab.add_variational_stats`, and warn if the fit
    has not ended; `None` if it only starts the chains, as under heredity."""
    fit_draws, statistics, (before, bound) = fitted
    if not np.isfinite(bound):
        raise FloatingPointError(
            "sparse_regression: the bound of the fit is not a number. Look for extreme values in "
            "X, y, weights and offset."
        )
    if only_starts:
        return None
    if bound - before > STILL:
        text = f"the bound still moves after {NUM_STEPS} steps of the fit"
        remedy = "Report the chains, and not `cavi`; if their r_hat is large, raise num_warmup."
        # of the caller, past the decorator
        warnings.warn(f"sparse_regression: {text}. {remedy}", stacklevel=6)
    draws = posterior(_tree(fit_draws, sizes, ["sample"]))
    probs = {"w": statistics.probs["w"][: sizes["w"]]}
    stats = statistics._replace(probs=probs).of_draws(draws, bound)
    return xr.DataTree.from_dict({"posterior": draws, "sample_stats": stats})


def _tree(draws: dict[str, Any], sizes: dict[str, int], dims: list[str]) -> xr.DataTree:
    """Make ArviZ data of draws, without those of padding columns."""
    arrays = {name: x[..., : sizes[name]] if name in sizes else x for name, x in draws.items()}
    groups = {"posterior": {k: x for k, x in arrays.items() if k != PROBABILITIES}}
    if PROBABILITIES in arrays:
        groups["sample_stats"] = {PROBABILITIES: arrays[PROBABILITIES]}
    names = {name: ["feature"] for name in sizes} | {"always": ["always_feature"]}
    names |= {"variance_share": ["part"], "cutpoints": ["cutpoint"], "log_hazard": ["piece"]}
    names |= {"w_spike": ["group"]} if sizes["w_spike"] != sizes["w"] else {}
    coords = {"part": ["columns", "background", "noise"]}
    return arviz_base.from_dict(groups, dims=names, coords=coords, sample_dims=dims)
