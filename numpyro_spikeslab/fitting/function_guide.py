# SPDX-License-Identifier: Apache-2.0
"""Latent functions in a paired guide: their factors, and predictions."""

from functools import partial
from typing import Any

from jaxtyping import Array

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.distributions import constraints

from numpyro_spikeslab.distributions import GaussianFunctions
from numpyro_spikeslab.fitting.function_updates import moments
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.inner import makes_delta
from numpyro_spikeslab.fitting.posterior import FunctionFactors, Posterior
from numpyro_spikeslab.fitting.predict import (
    checked_entries,
    checked_rows,
    predict_entries,
    predict_tasks,
    transform_rows,
)
from numpyro_spikeslab.fitting.refusals import refuse_other_params
from numpyro_spikeslab.fitting.starts import STEP
from numpyro_spikeslab.fitting.summaries import is_called
from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.reading.form import Form, find_function_sites, functions_of, is_latent
from numpyro_spikeslab.reading.model_run import abstract_trace
from numpyro_spikeslab.reading.reader import Reader, Reading


def _standard_normal(shape: tuple[int, ...], key: Array) -> Any:
    return random.normal(key, shape)


class FunctionGuide(SpikeSlabGuide):
    """What :class:`~numpyro_spikeslab.PairedGuide` has of latent functions."""

    def _find_functions(self, trace: dict[str, Any]) -> tuple[str, ...]:
        return tuple(name for name in find_function_sites(trace) if is_latent(trace, name))

    def _site_names(self, name: str) -> tuple[str, str]:
        return f"{name}_{self.prefix}_precision", f"{name}_{self.prefix}_linear"

    def _start_functions(self, name: str) -> dict[str, tuple[Any, Any]]:
        precision, linear = self._site_names(name)
        shape = self._shapes[name]
        return {
            precision: (jnp.ones(shape), constraints.nonnegative),
            linear: (jnp.zeros(shape), constraints.real),
        }

    def _sample_functions(self, model: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for name in self.functions:
            functions = functions_of(model[name])
            M, N = len(functions.templates), functions.num_inputs
            precision, linear = self._site_names(name)
            alpha = numpyro.param(precision, jnp.ones((M, N)), constraint=constraints.nonnegative)
            # a start at zero would be a saddle point of the weights and functions
            h = numpyro.param(linear, partial(_standard_normal, (M, N)))
            parameters = {site: model[site]["value"] for site in functions.site_names}
            mu = functions.mean_at(functions.X)
            posterior = GaussianFunctions(functions.covariances(parameters), mu, alpha, h)
            with numpyro.plate(self._function_plates[name][-1], M, dim=-1):
                result[name] = numpyro.sample(name, posterior)
        return result

    def pack(self, reading: Reading, params: dict[str, Any]) -> Posterior:
        known, form = reading.functions, reading.form
        if known is None or form.functions is None:
            return super().pack(reading, params)
        known.check_prior("PairedGuide")
        (pair,), sites = form.pairs, self._site_names(form.functions)
        shapes = dict.fromkeys(self.factors.names(pair.name), pair.shape)
        refuse_other_params("PairedGuide", params, shapes | dict.fromkeys(sites, known.mean.shape))
        posterior = super().pack(reading, params)
        alpha, h = (params[name] for name in sites)
        theta = known.theta(posterior.values)
        given = known.parameters, known.kernel, known.mean, theta, alpha, h
        mean, var, kl, prior_var = moments(*given)
        step = STEP * jnp.asarray(known.parameters.is_free, theta.dtype)
        functions = FunctionFactors(alpha, h, mean, var, kl, prior_var, theta, step)
        return posterior._replace(functions=functions)

    def unpack(self, form: Form, posterior: Posterior) -> dict[str, Any]:
        params = super().unpack(form, posterior)
        if posterior.functions is None or form.functions is None:
            return params
        precision, linear = self._site_names(form.functions)
        return params | {precision: posterior.functions.alpha, linear: posterior.functions.h}

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> Reading:
        if self.blocks is not None or not makes_delta(self.inner_guide):
            self.set_up(args, kwargs)
        return Reader(self.model, type(self).__name__)(args, kwargs)

    def _check_given(self, method: str, example: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_called(self.model, args, kwargs):
            raise ValueError(
                f"PairedGuide.{method}: a guide keeps no data. Give the model's arguments, as in "
                f"`guide.{method}(result.params, {example})`."
            )

    def _function_moments(self, params, args, kwargs) -> dict[str, tuple[Any, Any]]:
        if not find_function_sites(abstract_trace(self.model, args, kwargs)):
            return {}
        reading = self._read(args, kwargs)
        functions = self.pack(reading, params).functions
        if functions is None or reading.form.functions is None:
            return {}
        return {reading.form.functions: (functions.mean, functions.var)}

    @full_precision
    def predict(
        self,
        params: dict[str, Any],
        *args: Any,
        X_new: Any = None,
        entries: tuple[Any, Any] | None = None,
        noise: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Mean and variance of each task at new inputs, in closed form.

        For models with :func:`~numpyro_spikeslab.latent_functions`. The variance is that of the
        factorised posterior at one value of each hyperparameter, so intervals are narrower than
        those of a chain; see the documentation.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param X_new: new inputs, shape (S,) or (S, D) as in the model. The default, the inputs of
            the data, is the only choice where a kernel is a matrix; give objects to be predicted
            there as inputs without responses.
        :param entries: numbers of rows and of columns of entries of the table of the data, each of
            shape (L,); predictions are then of these alone. The default is the whole table, and,
            of data that are given as a sparse array, its entries.
        :param noise: whether to add the noise: predictions of observations instead of those of the
            noise-free tasks.
        :param kwargs: keyword arguments of the model.
        :return: mean and variance, each of shape (S, Q), or (L,) of entries.
        :raises ValueError: if the model has no latent functions that its weights mix, the inputs
            are not finite, empty or of another width, a kernel is a matrix, the location without
            functions changes from input to input, entries are outside of the table or come with new
            inputs, or ``noise`` is asked for where it varies along tasks or nothing tells it.
        """
        self._check_given("predict", "X, Y, X_new=X_new", args, kwargs)
        reading = self._read(args, kwargs)
        if reading.functions is None:
            raise ValueError(
                "PairedGuide.predict: the weights of the model mix no latent functions. Use "
                f"numpyro.infer.Predictive.{reading.if_traced}"
            )
        posterior = self.pack(reading, params)
        if reading.layout is None and entries is None:
            return predict_tasks(reading, posterior, X_new, noise)
        where = checked_entries(reading, entries, X_new)
        return predict_entries(reading, posterior, where, noise)

    @full_precision
    def transform(
        self, params: dict[str, Any], *args: Any, Y_new: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Mean and variance of the functions in new rows, with the weights of the fit.

        For functions without order (kernels "white", as in
        :func:`~numpyro_spikeslab.models.factor_analysis`): what scikit-learn calls the transform of
        a decomposition. The moments are those of the Gaussian factor that the fit would give to
        the functions of a row, all of them jointly, with the weights held.

        :param params: parameters, as from ``result.params``.
        :param args: arguments of the model, as for the fit.
        :param Y_new: new rows of the same tasks, shape (S, Q); NaN is a missing entry. Of a sparse
            array, of scipy or a ``BCOO``, the stored entries are the observations.
        :param kwargs: keyword arguments of the model.
        :return: mean and variance, each of shape (M, S) as the functions themselves.
        :raises ValueError: if the functions have an order, rows do not fit, or noise and location
            change from row to row.

        **Example**

        .. doctest::

            >>> import jax, numpyro_spikeslab as nss
            >>> phi, W, noise = (jax.random.normal(jax.random.key(k), s) for k, s in
            ...                  enumerate([(60, 2), (2, 5), (60, 5)]))
            >>> Y = phi @ W + 0.1 * noise
            >>> model = nss.models.factor_analysis(2)
            >>> guide = nss.PairedGuide(model)
            >>> result = nss.CAVI(model, guide, plain=True).run(
            ...     jax.random.key(3), 100, Y[:50], progress_bar=False
            ... )
            >>> mean, variance = guide.transform(result.params, Y[:50], Y_new=Y[50:])
            >>> mean.shape
            (2, 10)
        """
        reading = self._read(args, kwargs)
        Y_new = checked_rows(reading, Y_new)
        return transform_rows(reading, self.pack(reading, params), Y_new)
