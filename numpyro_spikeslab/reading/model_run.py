# SPDX-License-Identifier: Apache-2.0
"""Runs of a model at given values of its sites."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
import warnings
from zlib import crc32

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import random
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.constraints import Constraint
from numpyro.infer.util import helpful_support_errors
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.models.primitives import MARK, Functions
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import Observed, has_density
from numpyro_spikeslab.reading.program import Program, cut_program, on_device, trace_program
from numpyro_spikeslab.reading.sites import SET, Pair, find_function_sites, functions_of
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import Distributions, base_of


class PairPrior(NamedTuple):
    """Prior of one pair, in the shape of its weights.

    - **probs**, **log_odds** - of inclusion. Where weights share a spike, the first has its values
      and the others have 0.5 and 0, so sums over included weights are right.
    - **scale**, **loc** - of the slab.
    """

    probs: Array
    log_odds: Array
    scale: Array
    loc: Array


class Run(NamedTuple):
    """The results of one run of a model that inference needs, by the names of its sites.

    - **observed** - its observed sites of Normal or independent observations.
    - **pairs** - the priors of its pairs.
    - **log_probs** - log density of every sample site, summed, but of the pairs' own.
    - **priors** - distributions of its other latent sites.
    - **constraints** - of its params, where these are pytrees.
    - **functions** - inputs, kernels, prior means and values of the kernels' parameters.
    """

    observed: dict[str, Observed]
    pairs: dict[str, PairPrior]
    log_probs: dict[str, Array]
    priors: dict[str, Any]
    constraints: dict[str, Any]
    functions: dict[str, tuple[Any, tuple[Any, ...], Array, dict[str, Any]]]


def run_model(model: Any, args: tuple, kwargs: dict, data: dict[str, Any]) -> dict[str, Any]:
    """Trace the model with its sites set to ``data``."""
    model = handlers.substitute(model, substitute_fn=_concrete_rows)
    model = handlers.substitute(model, data=data)
    # sites with values draw no random numbers, which take long to compile
    with handlers.block():
        return handlers.trace(handlers.seed(model, random.key(0))).get_trace(*args, **kwargs)


def _concrete_rows(site: dict[str, Any]) -> Any:
    """Return the indices of a plate as numbers, which can index numpy's arrays."""
    if site["type"] != "plate":
        return None
    size, subsample_size = site["args"]
    with jax.ensure_compile_time_eval():
        # numpy's, for JAX would compile it
        return jnp.asarray(np.arange(size if subsample_size is None else subsample_size))


class _Inputs(Messenger):
    """A handler that makes variables of the values of latent sites, params and weights, at which a
    program can be cut; but not within NumPyro's loops and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Replace the value of a message, before it is traced."""
        products = msg.get("intermediates") or [msg["value"]]
        is_product = msg["type"] == "deterministic" and f"{msg['name']}_spike" in self.values
        # else a handler has set it
        is_product &= msg["value"] is products[0]
        is_latent = msg["type"] == "sample" and not msg["is_observed"]
        if not (is_latent or is_product or msg["type"] == "param"):
            return
        if "_control_flow_done" not in msg:
            msg["value"] = jax.tree.map(_variable, msg["value"])
        if is_product:
            msg["intermediates"] = [msg["value"]]
        named = self.weights if is_product else self.values
        named[msg["name"]] = jax.tree.map(jnp.asarray, msg["value"])


def _variable(x: Any) -> Array:
    """Return a variable of the same value, of a strong type."""
    x = jnp.asarray(x)
    return checkpoint_name(jax.lax.convert_element_type(x, x.dtype), "input")


class ModelTrace(NamedTuple):
    """The results of one run of a model at generic values of its latent sites.

    - **sites** - their types, shapes, names and plates, without values.
    - **pairs** - the spike-and-slab weights among them.
    - **generic**, **generic_constants** - the program of the generic values of latent sites and of
      the first values of params, and its constants.
    - **run**, **constants** - the program of :meth:`Problem.run`, and its constants.
    """

    sites: dict[str, Any]
    pairs: tuple[Pair, ...]
    generic: Program
    generic_constants: tuple
    run: Program
    constants: tuple

    def on_device(self, constants: tuple) -> "ModelTrace":
        """Return the trace with these constants, which are on the device.

        JAX would give the types of numpy's, as long as these are kept, to a trace in another
        precision.
        """
        placed = {id(x): y for x, y in zip(self.constants, constants, strict=True)}
        generic_constants = on_device(tuple(placed.get(id(x), x) for x in self.generic_constants))
        return self._replace(generic_constants=generic_constants, constants=constants)


def trace_model(
    model: Any,
    args: tuple,
    kwargs: dict,
    user: str,
    pairs_of: Callable[[dict[str, Any]], tuple[Pair, ...]],
) -> ModelTrace:
    """Run a model once, with the values of its latent sites and params as variables.

    :param user: name of the caller in error messages.
    :param pairs_of: finds the pairs among the sites, or raises.
    """
    sites_and_pairs: list[Any] = []

    def run():
        inputs = _Inputs()
        trace = _generic_trace(model, args, kwargs, user, inputs)
        sites = _without_values(trace)
        pairs, values = pairs_of(sites), inputs.values
        parts = {name: values.pop(name) for pair in pairs for name in pair.shapes}
        weights = {k: inputs.weights.get(k, jnp.zeros(shape)) for k, shape, *_ in pairs}
        sites_and_pairs.extend((sites, pairs))
        arguments = values, weights, parts
        return _results_of(trace, pairs, arguments), arguments

    closed, shapes = jax.make_jaxpr(run, return_shape=True)()
    sites, pairs = sites_and_pairs
    out_tree, in_tree = (jax.tree.structure(x) for x in shapes)
    outvars, split = closed.jaxpr.outvars, len(jax.tree.leaves(shapes[0]))
    values, _, parts = jax.tree.unflatten(in_tree, outvars[split:])
    first, tree = jax.tree.flatten(values | parts)
    generic = cut_program(closed, [], first, jax.tree.structure(()), tree)
    if not any("_control_flow_done" in site for site in sites.values()):
        cut = cut_program(closed, outvars[split:], outvars[:split], in_tree, out_tree)
        return ModelTrace(sites, pairs, *generic, *cut)

    def again(values, weights, parts):
        trace = run_model(model, args, kwargs, values | weights | parts)
        return _results_of(trace, pairs, (values, weights, parts))

    return ModelTrace(sites, pairs, *generic, *trace_program(again, *shapes[1]))


def _generic_trace(
    model: Any, args: tuple, kwargs: dict, user: str, inputs: _Inputs
) -> dict[str, Any]:
    """Trace a model at generic values. Errors get a note that ``user`` could not run it."""
    try:
        with handlers.block(), inputs:
            model = handlers.substitute(model, substitute_fn=_generic_if_unset)
            return handlers.trace(handlers.seed(model, random.key(0))).get_trace(*args, **kwargs)
    except (AssertionError, TypeError, ValueError) as error:
        arguments = dict(enumerate(args)) | kwargs
        tables = [name for name, x in arguments.items() if hasattr(x, "to_numpy")]
        if tables and isinstance(error, TypeError):
            # the history of a tracer has 60 lines
            cause = None if isinstance(error, jax.errors.TracerArrayConversionError) else error
            what, got = f"{user}: arguments of the model", f"tables of pandas in {tables}"
            raise bad(what, got, "arrays", "Give it `X.to_numpy()`.") from cause
        hint = "Do its arguments fit, and the sizes of its plates its data?"
        error.add_note(f"{user} could not run the model. {hint}")
        raise


def _without_values(trace: dict[str, Any]) -> dict[str, Any]:
    """Replace the arrays that end with the trace by their shapes, one by the same one."""
    shapes: dict[int, Any] = {}

    def shape(x):
        if isinstance(x, Functions):
            return replace(x, X=shape(x.X), templates=jax.tree.map(shape, x.templates))
        if not_jax_tracer(x):
            return x
        return shapes.setdefault(id(x), jax.ShapeDtypeStruct(x.shape, x.dtype))

    return {name: {k: jax.tree.map(shape, x) for k, x in trace[name].items()} for name in trace}


def abstract_trace(model: Any, args: tuple, kwargs: dict, user: str = "NumPyro") -> dict[str, Any]:
    """Return the types, shapes, names and plates of the sites of a model, without values."""
    sites: dict[str, Any] = {}

    def run():
        sites.update(_without_values(_generic_trace(model, args, kwargs, user, _Inputs())))

    jax.make_jaxpr(run)()
    return sites


def _generic_if_unset(site: dict[str, Any]) -> Any:
    """Draw as NumPyro's ``init_to_uniform`` does, by numpy's generator, for JAX's takes longer to
    compile than the rest of a model. A site that the user's handlers have set keeps its value."""
    if site["type"] != "sample":
        return _concrete_rows(site)
    if site["value"] is not None:
        site[SET] = not site["is_observed"]
        return None
    fn = site["fn"]
    if site["infer"].get(MARK, ("", ""))[1] == "spike":
        return jnp.asarray(np.ones(fn.shape(), int))
    if site["is_observed"] or fn.support.is_discrete:
        return None
    with helpful_support_errors(site):
        transform = biject_to(fn.support)
    shape = site["kwargs"]["sample_shape"] + transform.inverse_shape(fn.shape())
    rng = np.random.default_rng(crc32(site["name"].encode()))
    return transform(jnp.asarray(rng.uniform(-2.0, 2.0, shape), float))


def _results_of(trace: dict[str, Any], pairs: tuple[Pair, ...], arguments: tuple) -> Run:
    """Return the results of a trace, given the arguments of :meth:`Problem.run`."""
    values, _, parts = arguments
    sites = {k: x for k, x in trace.items() if x["type"] == "sample" and k not in parts}
    params = {k: x["kwargs"] for k, x in trace.items() if x["type"] == "param"}
    ranges = {k: x.get("constraint", constraints.real) for k, x in params.items()}
    functions = {k: functions_of(trace[k]) for k in find_function_sites(trace)}
    observed = {k: x for k, x in sites.items() if x["is_observed"] and has_density(x["fn"])}
    no_tree = Constraint.tree_flatten
    return Run(
        observed={k: Observed.of(x, log_density) for k, x in observed.items()},
        pairs={pair.name: _pair_prior(trace, pair) for pair in pairs},
        log_probs={k: jnp.sum(site_log_prob(x)) for k, x in sites.items()},
        priors=Distributions(
            {k: x["fn"] for k, x in sites.items() if k in values and k not in functions}
        ),
        constraints={k: x for k, x in ranges.items() if type(x).tree_flatten is not no_tree},
        functions={k: _function_arrays(trace, f) for k, f in functions.items()},
    )


def _function_arrays(trace: dict[str, Any], functions: Functions) -> tuple:
    sites = [name for name in functions.parameters.sites if name in trace]
    parameters = {name: trace[name]["value"] for name in sites}
    return functions.X, functions.templates, functions.mean_at(functions.X), parameters


def site_log_prob(site: dict[str, Any]) -> Any:
    """Compute the log density of a site's value."""
    log_prob = log_density(site["fn"], site["value"])
    return log_prob if site["scale"] is None else log_prob * site["scale"]


def log_density(fn: Any, value: Any) -> Any:
    """Compute the log density of each value."""
    with warnings.catch_warnings():
        # missing observations may be NaN, and bad values get a better message
        warnings.filterwarnings("ignore", "Out-of-support values")
        # of numpy's values NumPyro would check the support by numpy, for traced bounds too
        return fn.log_prob(jnp.asarray(value))


def _pair_prior(trace: dict[str, Any], pair: Pair) -> PairPrior:
    spike, slab = (base_of(trace[name]["fn"]) for name in (pair.spike, pair.slab))
    if isinstance(spike, dist.BernoulliLogits):
        probs, log_odds = jax.nn.sigmoid(spike.logits), spike.logits
    else:
        probs, log_odds = spike.probs, jnp.log(spike.probs) - jnp.log1p(-spike.probs)
    dtype = jnp.result_type(float)

    def of_weights(x, other=None):
        x = jnp.asarray(x, dtype)
        if pair.groups is None or other is None:
            return jnp.broadcast_to(x, pair.shape)
        return jnp.full(pair.shape, other, dtype).at[pair.firsts].set(x)

    inclusion = of_weights(probs, 0.5), of_weights(log_odds, 0.0)
    return PairPrior(*inclusion, of_weights(slab.scale), of_weights(slab.loc))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """A model, as its description and its program, with its data, the constants.

    - **density** - of non-Normal observations, given the predictor; see
      :class:`~numpyro_spikeslab.reading.likelihood.Density`.
    """

    form: Form = field(metadata={"static": True})
    program: Program = field(metadata={"static": True})
    constants: tuple
    density: Program | None = field(default=None, metadata={"static": True})

    @property
    def inputs(self) -> dict[str, Any]:
        """Shapes of the arguments of :meth:`run`, by their names."""
        return dict(zip(("values", "weights", "parts"), self.program.arguments, strict=True))

    def run(
        self,
        values: dict[str, Any],
        weights: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        of: Callable[[Run], Any] | None = None,
    ) -> Any:
        """Run the model.

        :param values: of ``form.others``, and of the functions; these are zero by default.
        :param weights: products of spikes and slabs; zero by default.
        :param parts: spikes and slabs, on which no result may depend; zero by default.
        :param of: takes a part of the :class:`Run`, and the rest is not computed.
        """
        program = self.program if of is None else self.program.part(of)
        return program(self.constants, *self._arguments(values, weights, parts))

    def given_predictor(
        self, values: dict[str, Any], predictor: Any, of: Callable[[Any], Any]
    ) -> Any:
        """Compute a part of the density of the observations, given the predictor."""
        assert self.density is not None
        arguments = *self._arguments(values), predictor
        return self.density.part(of)(self.constants, *arguments)

    def _arguments(self, values: Any, weights: Any = None, parts: Any = None) -> tuple:
        form, zero = self.form, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.inputs)
        sites = zero["values"] | {name: values[name] for name in form.others}
        if form.functions in values:
            sites[form.functions] = values[form.functions]
        weights = zero["weights"] if weights is None else weights
        parts = zero["parts"] if parts is None else parts
        return sites, weights, parts

    def observations(self, run: Any) -> Any:
        """Return the observations of a run, or the shapes or sources of its results."""
        return run.observed[self.form.response]

    def part(self, run: Run, name: str) -> list[Any]:
        """Return noise scales, inclusion probabilities, slab scales or the scales of coefficients,
        the part of a role."""
        if name == "noise":
            return [self.observations(run).scale]
        if name == "coefficient":
            return [base_of(run.priors[k]).scale for k in self.form.coefficients]
        which = "probs" if name == "inclusion" else "scale"
        return [getattr(run.pairs[pair.name], which) for pair in self.form.pairs]

    def predictor(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None, parts: Any = None
    ) -> Float[Array, "..."]:
        """Compute the location of the observations, in their shape."""
        x = self.run(values, weights, parts, lambda run: self.observations(run).predictor)
        return jnp.broadcast_to(x, self.observations(self.program.shapes).value.shape)

    def observed(self, x: Float[Array, "N Q"] | Float[Array, " L"]) -> Float[Array, "..."]:
        """Return a table with tasks as columns, or its entries, in the observations' shape."""
        x = x.T if self.form.tasks_first else x
        return x.reshape(self.observations(self.program.shapes).value.shape)

    def predictor_of_tasks(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None
    ) -> Float[Array, "N Q"]:
        """Compute :meth:`predictor` with tasks as columns."""
        return self.form.tasks_last(self.predictor(values, weights))
