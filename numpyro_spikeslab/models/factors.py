# SPDX-License-Identifier: Apache-2.0
"""The multi-task model of latent functions, and factor analysis, as plain NumPyro models."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from inspect import isclass, signature
from types import SimpleNamespace
from typing import Any
import warnings

import numpy as np

import jax
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.models.primitives import ENTRIES_MARK, sample_functions, spike_slab
from numpyro_spikeslab.models.sparse import Observations, entries_of, is_sparse
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers, in_pandas, is_array

UNITS = 1e3
"""Columns of a table whose standard deviations differ by a larger factor have different units."""

_USER = "mtmkl, factor_analysis"


def mtmkl(
    kernels: Any,
    *,
    likelihood: Callable[..., dist.Distribution] = dist.Normal,
    num_tasks: int | None = None,
    mean: Any = None,
    shared_noise: bool = False,
    shared_inclusion: bool = True,
    buffet: Any = None,
    priors: Mapping[str, dist.Distribution] | None = None,
) -> Callable[..., Any]:
    r"""Make the multi-task multiple-kernel model of Titsias and Lazaro-Gredilla (2011), eq. 1.

    Q tasks are sparse mixtures of M latent functions,
    :math:`y_{nq} \sim \mathcal{N}(\sum_m w_{qm} \phi_m(x_n), \sigma_q^2)`, with spike-and-slab
    weights. Classes, counts and heavy tails have other distributions around
    :math:`f_{nq} = \sum_m w_{qm} \phi_m(x_n)`. The sites are

    - ``phi``, the functions, shape (M, N), and the parameters of their kernels, such as
      ``phi_scale``, see :func:`~numpyro_spikeslab.latent_functions`;
    - ``W_spike``, ``W_slab`` and ``W``, the weights, shape (Q, M);
    - ``inclusion``, ``slab_scale`` and, where the likelihood has it, ``noise``; ``alpha`` where
      ``buffet`` is its prior;
    - ``f``, deterministic, and ``Y``, shape (N, Q);
    - with ``X_new``: ``phi_new`` given ``phi``, (M, S), and ``f_new`` and ``Y_new``, (S, Q).

    The plates are ``task``, ``latent``, ``point`` and, with ``X_new``, ``new_point``.

    :param kernels: a list of M kernels; ``[kernel] * M`` gives one kernel to all functions.
    :param likelihood: makes the distribution of the observations from ``f`` and ``noise``, which is
        a positive number for each task, or from ``f`` alone; then the model has no ``noise``.
        Examples are ``lambda f: dist.Bernoulli(logits=f)`` and ``lambda f, noise:
        dist.NegativeBinomial2(jnp.exp(f), noise)``, whose noise is the concentration. Add offsets
        to ``f``. For which of them there are fits and chains: :doc:`/many_tasks`.
    :param num_tasks: Q, needed where the model runs without ``Y``.
    :param mean: prior means of the functions, see :func:`~numpyro_spikeslab.latent_functions`.
    :param shared_noise: whether all tasks have one ``noise``, a standard deviation in the Normal
        likelihood, instead of one each.
    :param shared_inclusion: whether all functions have one inclusion probability, as in the paper,
        instead of one each, which switches off unneeded functions but takes more than
        three tasks to learn.
    :param buffet: concentration of an Indian buffet prior, of M functions in place of infinitely
        many (Griffiths and Ghahramani 2011): a positive number ``alpha``, or the prior of the site
        ``alpha``, such as ``dist.Gamma(2.0, 1.0)``. Each function has an ``inclusion`` from
        ``Beta(alpha / M, 1)``. A task uses about ``alpha / (1 + alpha / M)`` functions, and most
        of the functions stay idle if M is large.
    :param priors: priors by name. ``"noise"``, ``"slab_scale"`` and ``"inclusion"`` are those of
        the sites, by default ``HalfNormal(10)``, ``HalfNormal(10)`` and ``Beta(1, 1)``, which suit
        responses of about unit scale. Parameters of kernels are named by their path, such as
        ``"scale"``; see :func:`~numpyro_spikeslab.latent_functions` for their defaults.
    :return: ``model(X, Y=None, X_new=None, mask=None)``. ``Y`` has shape (N, Q), or (N,) for one
        task; NaN is a missing entry, as is NA in a DataFrame, and so is one where the boolean
        ``mask``, of the same shape, is false. ``Y`` may be sparse as in :func:`factor_analysis`, if
        all functions are ``"white"``; then ``f`` and ``Y`` have the shape (L,) and the plate
        ``entry``. ``X_new`` is for predictions from samples with ``Predictive``; leave it out of
        fits.
    :raises ValueError: if ``kernels`` is no list or empty, or ``likelihood`` has other arguments;
        when the model runs, if the number of tasks is unknown, shapes do not match, ``mask`` is not
        boolean or accompanies a sparse ``Y``, or ``Y`` is a masked array.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from tinygp import kernels
        >>> import numpyro_spikeslab as nss
        >>> model = nss.models.mtmkl(
        ...     [kernels.ExpSquared(1.0)] * 3, num_tasks=4, priors={"noise": dist.HalfNormal(1.0)}
        ... )
        >>> prior = Predictive(model, num_samples=2)(jax.random.key(0), jnp.linspace(0, 1, 5))
        >>> prior["Y"].shape, prior["phi"].shape, prior["W"].shape
        ((2, 5, 4), (2, 3, 5), (2, 4, 3))
    """
    if not isinstance(kernels, list | tuple) or not kernels:
        remedy = "Give all functions one kernel by `[kernel] * M`."
        raise bad("mtmkl: kernels", kernels, "a list, of at least one function", remedy)
    is_prior = isinstance(buffet, dist.Distribution)
    if not (buffet is None or is_prior or (np.ndim(buffet) == 0 and buffet > 0)):
        raise bad("mtmkl: buffet", buffet, "a positive number, or the prior of one")
    if buffet is not None and "inclusion" in (priors or {}):
        remedy = "The prior of `inclusion` follows from buffet: give one of both."
        raise bad("mtmkl: priors['inclusion']", "a prior beside buffet", "none", remedy)
    options = SimpleNamespace(
        kernels=list(kernels),
        likelihood=likelihood,
        has_noise=_takes_noise(likelihood),
        num_tasks=num_tasks,
        mean=mean,
        shared_noise=shared_noise,
        shared_inclusion=shared_inclusion and buffet is None,
        buffet=buffet,
        priors=dict(priors or {}),
    )
    return partial(_mtmkl, options)


def factor_analysis(
    num_factors: int,
    *,
    likelihood: Callable[..., dist.Distribution] = dist.Normal,
    shared_noise: bool = False,
    shared_inclusion: bool = True,
    buffet: Any = None,
    priors: Mapping[str, dist.Distribution] | None = None,
) -> Callable[..., Any]:
    r"""Make a model of sparse factor analysis of a table, with a noise scale for each column.

    :math:`y_{nq} \sim \mathcal{N}(\sum_m w_{qm} \phi_{mn}, \sigma_q^2)` with
    :math:`\phi_{mn} \sim \mathcal{N}(0, 1)`: :func:`mtmkl` with M ``"white"`` functions, whose
    tasks are the columns and whose points are the rows. Sites, plates and priors are those of
    :func:`mtmkl`. The model has no means: centre the columns, and divide them by their standard
    deviations unless their units agree. With another likelihood add an offset to ``f``.

    :param num_factors: M, the largest number of factors.
    :param likelihood: makes the distribution of the entries, see :func:`mtmkl`.
    :param shared_noise: see :func:`mtmkl`.
    :param shared_inclusion: likewise.
    :param buffet: likewise; then ``num_factors`` only bounds the number of factors in use.
    :param priors: likewise.
    :return: ``model(Y, mask=None)`` with ``Y`` of shape (N, Q); NaN is a missing entry, and so is
        one where the boolean ``mask``, of the same shape, is false. A sparse ``Y``, of scipy or a
        ``BCOO``, is not made dense: its stored entries, zeros too, are the observations.
    :raises ValueError: if there is no factor; when the model runs, if ``Y`` has another rank or
        infinite entries, or a sparse ``Y`` has duplicate entries or is stored by blocks
        or diagonals. A warning names columns whose standard deviations differ by more than a factor
        of 1,000.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro import handlers
        >>> import numpyro_spikeslab as nss
        >>> model = handlers.seed(nss.models.factor_analysis(2), 0)
        >>> trace = handlers.trace(model).get_trace(jnp.ones((5, 3)))
        >>> trace["noise"]["value"].shape, trace["W"]["value"].shape, trace["phi"]["value"].shape
        ((3,), (3, 2), (2, 5))

    A table of zeros and ones, in which ``f`` are the log odds:

    .. doctest::

        >>> import numpyro.distributions as dist
        >>> model = nss.models.factor_analysis(2, likelihood=lambda f: dist.Bernoulli(logits=f))
        >>> trace = handlers.trace(handlers.seed(model, 0)).get_trace(jnp.eye(5))
        >>> "noise" in trace, trace["f"]["value"].shape
        (False, (5, 5))
    """
    model = mtmkl(
        ["white"] * num_factors,
        likelihood=likelihood,
        shared_noise=shared_noise,
        shared_inclusion=shared_inclusion,
        buffet=buffet,
        priors=priors,
    )
    return partial(_table_model, model)


def _table_model(model, Y, mask=None):
    shape = np.shape(Y)
    if len(shape) != 2:
        who = "factor_analysis: Y"
        raise bad(who, f"shape {shape}", "(N, Q), a row for each sample")
    return model(np.arange(shape[0]), Y, mask=mask)


def _mtmkl(options, X, Y=None, X_new=None, mask=None):
    N = np.shape(X)[0]
    M, Q = len(options.kernels), _num_tasks(N, Y, options.num_tasks)
    # made here, in the precision in which the model runs
    wide, flat = dist.HalfNormal(10.0), dist.Beta(1.0, 1.0)
    defaults = {"inclusion": flat, "slab_scale": wide}
    defaults |= {"noise": wide} if options.has_noise else {}
    priors = defaults | options.priors
    if (alpha := options.buffet) is not None:
        if isinstance(alpha, dist.Distribution):
            alpha = numpyro.sample("alpha", alpha)
        priors["inclusion"] = dist.Beta(alpha / M, 1.0)
    with nullcontext() if options.shared_inclusion else numpyro.plate("latent", M):
        pi = numpyro.sample("inclusion", priors["inclusion"])
    slab = numpyro.sample("slab_scale", priors["slab_scale"])
    task = numpyro.plate("task", Q, dim=-1)
    noise: list[Any] = []
    if options.has_noise:
        with nullcontext() if options.shared_noise else task:
            noise = [numpyro.sample("noise", priors["noise"])]
    entries = entries_of(Y, f"{_USER}: Y") if is_sparse(Y) else None
    if entries is not None and mask is not None:
        remedy = "The stored entries of a sparse Y, zeros too, are the observations."
        raise bad(f"{_USER}: mask", "a mask of a sparse Y", "none", remedy)
    if entries is None and Y is not None:
        table = in_pandas(f"{_USER}: Y", Y)
        Y = Y if is_array(Y) else as_numbers(f"{_USER}: Y", table, may_miss=True)
        if options.likelihood is dist.Normal:
            _warn_of_units(Y, getattr(table, "columns", range(Q)))
    of_kernels = {name: prior for name, prior in options.priors.items() if name not in defaults}
    phi, functions, sites = sample_functions(
        "phi", options.kernels, X, options.mean, of_kernels, point="point"
    )
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = spike_slab("W", pi, slab)
    if entries is None:
        _observe_table(task, (W @ phi).T, lambda f: options.likelihood(f, *noise), Y, mask)
    else:
        of_entries = [x if jnp.ndim(x) == 0 else x[entries.columns] for x in noise]
        _observe_entries(entries, W, phi, lambda f: options.likelihood(f, *of_entries))
    if X_new is None:
        return
    with numpyro.plate("latent", M):
        phi_new = numpyro.sample("phi_new", functions.conditional(sites, phi, X_new))
    with numpyro.plate("new_point", np.shape(X_new)[0], dim=-2), task:
        f_new = numpyro.deterministic("f_new", (W @ phi_new).T)
        numpyro.sample("Y_new", options.likelihood(f_new, *noise))


def _warn_of_units(Y: Any, names: Any) -> None:
    """Warn if the standard deviations of columns differ by more than a factor of :data:`UNITS`."""
    if not not_jax_tracer(Y) or not getattr(Y, "is_fully_addressable", True):
        return
    # a part of the rows, for a model runs often
    rows = np.ma.masked_invalid(np.reshape(np.asarray(Y), (len(Y), -1))[:1000])
    spread = rows.std(axis=0).filled(0.0)
    least, most = np.argmin(np.where(spread > 0, spread, np.inf)), np.argmax(spread)
    if spread[most] > UNITS * spread[least] > 0:
        warnings.warn(
            f"{_USER}: the standard deviation of column {names[most]!r} of Y is "
            f"{spread[most] / spread[least]:.2g} times that of {names[least]!r}, but their weights "
            "have one slab scale. Divide the columns by their standard deviations.",
            stacklevel=2,
        )


def _takes_noise(likelihood: Callable[..., dist.Distribution]) -> bool:
    """Whether a likelihood is a function of ``(f, noise)``, not of ``f`` alone."""
    parameters = signature(likelihood).parameters.values()
    places = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if [x.name for x in places[:2]] == ["loc", "scale"]:
        return True
    required = [x.name for x in places if x.default is x.empty]
    if isclass(likelihood) or len(required) not in (1, 2):
        got = f"a function of {[x.name for x in places]}"
        remedy = "Write it so: `lambda f: dist.Bernoulli(logits=f)`."
        raise bad("mtmkl: likelihood", got, "one of `f`, or of `f` and `noise`", remedy)
    return len(required) == 2


def _observe_entries(entries: Observations, W: Any, phi: Any, likelihood: Any) -> None:
    """Sample the observed entries of a sparse table, without making it dense."""

    def add(f, feature):
        w, function = feature
        return f + w[entries.columns] * function[entries.rows], None

    f, _ = jax.lax.scan(add, jnp.zeros(len(entries.rows)), (W.T, phi))
    with numpyro.plate("entry", len(entries.rows)):
        f = numpyro.deterministic("f", f)
        mark = {ENTRIES_MARK: (entries.rows, entries.columns)}
        numpyro.sample("Y", likelihood(f), obs=entries.values, infer=mark)


def _observe_table(task: Any, f: Any, likelihood: Any, Y: Any, mask: Any) -> None:
    """Sample a table, with its missing entries masked."""
    if np.ma.isMaskedArray(Y):
        remedy = "Give `Y.filled(np.nan)`, or `Y.data` and `mask=~np.ma.getmaskarray(Y)`."
        raise bad("mtmkl: Y", "a masked array", "an array", remedy)
    with numpyro.plate("point", len(f), dim=-2), task, ExitStack() as stack:
        f = numpyro.deterministic("f", f)
        if Y is not None:
            shapes = f.shape, jnp.shape(Y)
            Y = jnp.reshape(jnp.asarray(Y), f.shape)
            observed = ~jnp.isnan(Y)
            if mask is not None:
                mask = jnp.asarray(mask)
                if mask.shape not in shapes or mask.dtype != bool:
                    got = f"{mask.dtype} of shape {mask.shape}"
                    raise bad("mtmkl: mask", got, f"boolean of the shape {Y.shape} of Y")
                observed &= jnp.reshape(mask, Y.shape)
            stack.enter_context(handlers.mask(mask=observed))
            # the likelihood may allow no zero, and gradients of its density there be NaN
            allowed = jnp.nan_to_num(1.0 * jnp.ravel(Y)[jnp.argmax(observed)])
            Y = jnp.where(observed, Y, allowed)
        numpyro.sample("Y", likelihood(f), obs=Y)


def _num_tasks(N: int, Y: Any, num_tasks: int | None) -> int:
    if Y is None:
        if num_tasks is None:
            raise bad("mtmkl: num_tasks", "None without Y", "a number")
        return num_tasks
    shape = np.shape(Y)
    if len(shape) not in (1, 2) or shape[0] != N:
        raise bad("mtmkl: Y", f"shape {shape}", f"({N}, Q) or ({N},), as many rows as X")
    Q = 1 if len(shape) == 1 else shape[1]
    if num_tasks not in (None, Q):
        raise bad("mtmkl: Y", f"{Q} tasks", f"num_tasks={num_tasks}")
    return Q
