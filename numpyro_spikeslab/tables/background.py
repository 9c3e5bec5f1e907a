# SPDX-License-Identifier: Apache-2.0
"""Draws of a background in rows, and the density of each row given all others."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np
import xarray as xr

from jax import random

from numpyro_spikeslab.models.background import Background
from numpyro_spikeslab.models.responses import Fitted, ResponseKind
from numpyro_spikeslab.reporting.arviz_data import mean, posterior
from numpyro_spikeslab.tables.checks import Rows
from numpyro_spikeslab.tables.units import Units, standard_columns, standardise

COVARIANCE = "background_covariance"
"""The constant of a result that keeps the covariance of a background, if it was given."""


class RowsGivenDraws(NamedTuple):
    """S draws of a regression with a background, in standard units; rows follow by Gaussians.

    - **residual** - rotated responses less the columns.
    - **scale**, **noise** - standard deviations of background and noise.
    - **columns** - the rotated columns, for covariances with new rows.
    - **precisions** - of the noise of rows.
    """

    units: Units
    residual: Float[np.ndarray, "S L"]
    scale: Float[np.ndarray, "S 1"]
    noise: Float[np.ndarray, "S 1"]
    columns: Float[np.ndarray, "L P"]
    precisions: Float[np.ndarray, " N"]

    @classmethod
    def of(cls, dt: xr.DataTree, rows: xr.Dataset, kind: ResponseKind) -> "RowsGivenDraws":
        """Return the draws of a result.

        :param rows: of the regression.
        """
        y, draws = dt["observed_data"].to_dataset()["y"].values.astype(float), posterior(dt)
        given = Rows.stored(rows, y)
        covariance = rows[COVARIANCE].values if COVARIANCE in rows else True
        none = np.zeros(rows.sizes["feature"], bool)
        units, data = standardise(rows["X"], given, none, kind, covariance=covariance)
        w = (draws["w"] * units.x["sd"] / units.y_sd).values.reshape(-1, len(none))
        scale, noise = (draws[k].values.reshape(-1, 1) for k in ("background_scale", "sigma"))
        residual = data["y"] - w @ data["X"].T
        noise = noise / (units.y_sd * units.noise)
        precisions = given.weights / units.noise**2
        return cls(units, residual, scale / units.y_sd, noise, data["X"], precisions)

    @property
    def parts(self) -> Background:
        """Return the rotation of the rows."""
        assert self.units.background is not None
        return self.units.background

    @property
    def precision(self) -> Float[np.ndarray, "S L"]:
        """Of rotated rows, with the background integrated out."""
        return 1 / (self.scale**2 * self.parts.eigenvalues + self.noise**2)

    def covariances(
        self, rows: xr.Dataset
    ) -> tuple[Float[np.ndarray, "R L"], Float[np.ndarray, " R"]]:
        """Return covariances of the background of rows with its rotated parts, and its variances,
        relative to ``scale**2``."""
        if COVARIANCE in rows:
            # of the rows of the regression, as far as they differ
            back = (self.parts.rows / self.precisions).T
            return back * self.parts.eigenvalues, back**2 @ self.parts.eigenvalues
        Z = standard_columns(rows["X"].values, self.units.x)
        return Z @ self.columns.T / self.parts.unit, np.sum(Z**2, axis=1) / self.parts.unit

    def draw(self, key: Array, covariance: Any, variance: Any) -> Float[np.ndarray, "S R"]:
        """Draw the background of rows, each by itself, in units of the response."""
        slope = self.scale**2 * self.precision
        left = variance - slope @ (covariance**2).T
        sd = self.scale * np.sqrt(np.maximum(left, 0))
        g = (slope * self.residual) @ covariance.T + sd * np.asarray(random.normal(key, sd.shape))
        return g * self.units.y_sd

    def log_likelihood(self) -> Float[np.ndarray, "S N"]:
        """Compute the log density of each row given all others and the draw."""
        precision = self.precision @ self.parts.rows**2
        error = (self.residual * self.precision) @ self.parts.rows / np.sqrt(precision)
        return 0.5 * (np.log(precision / (2 * np.pi)) - error**2) - np.log(self.units.y_sd)


def rotated_fit(tree: xr.DataTree, units: Units, fitted: Fitted) -> Fitted:
    """Return rotated responses, whose noise is independent; as they are without a background."""
    if units.background is None:
        return fitted
    scale, sigma = (float(mean(posterior(tree)[k])) for k in ("background_scale", "sigma"))
    variances = scale**2 * units.background.eigenvalues + (sigma / units.noise) ** 2
    y, predictor = map(units.background.rotate, (fitted.y, fitted.predictor))
    return Fitted(y, predictor, np.ones(len(y)), 1 / variances)
