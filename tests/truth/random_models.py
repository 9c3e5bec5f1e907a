# SPDX-License-Identifier: Apache-2.0
"""Random models.

A model is a structure, what its author has written, and data, which it takes as arguments. Few
structures with many data compile little.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss

LAYOUTS = ("one pair", "two pairs", "grid", "tasks", "tasks first", "own features")
"""Of the weights and observations. A grid has weights in nested plates, all of one response;
tasks share their features, except in the last."""


def _priors(rows: int, tasks: int) -> dict[str, dict[str, Any]]:
    """What else is unknown: the priors of the other sites."""
    normal, positive = dist.Normal(0.0, 1.0), dist.HalfNormal(1.0)
    return {
        "none": {},
        "intercept": {"b": normal},
        "held intercept": {"b": normal},
        "gate": {"z": dist.Bernoulli(0.5)},
        "switch": {"b": normal},
        "steep switch": {"b": normal},
        "assignment": {"z": dist.Bernoulli(0.5).expand([rows]).to_event(1)},
        "row gain": {"g": dist.LogNormal(0.0, 0.3).expand([rows]).to_event(1)},
        "noise": {"s": positive},
        "noise of each": {"s": positive.expand([tasks]).to_event(1)},
        "noise switch": {"b": normal, "s": positive},
        "hyperparameters": {"pi": dist.Uniform(0.1, 0.8), "t": positive},
        "mask switch": {"b": normal},
        "scale": {"s": positive},
    }


SITES = tuple(_priors(1, 1))

BENDS = {
    "tanh": lambda x, values, w: 50.0 * jnp.tanh(x / 50.0),
    "square on one side": lambda x, values, w: jnp.where(
        sum(jnp.sum(value) for value in values.values()) < 1e3, x, x**2
    ),
    "kink": lambda x, values, w: jnp.maximum(x, -1e6),
    "product of weights": lambda x, values, w: x + 1e-4 * w[0] * w[1],
    "rounding": lambda x, values, w: x + jnp.floor(1e-6 * x),
}
"""What makes a location bend in the weights, by the location, the other sites and the weights."""

LINKS = (
    *BENDS,
    *("own response", "noise of weights", "mask of weights", "likelihood", "prior of weights"),
)
"""What must be refused."""


class Structure(NamedTuple):
    """What the author of a model has written; see :data:`LAYOUTS`, :data:`SITES`, :data:`LINKS`.

    - **event** - whether the last axis of the observations is an event.
    - **varying** - whether noise is given for each observation, not once.
    - **counts** - which masks and scales there are.
    """

    layout: str
    sites: str
    link: str | None
    event: bool
    varying: bool
    counts: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the observations."""
        tasks = {"tasks": (6, 2), "tasks first": (2, 6), "own features": (6, 2)}
        return tasks.get(self.layout, (9,))

    @property
    def pairs(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights."""
        if self.layout == "two pairs":
            return {"w": (3,), "v": (1,)}
        return {"w": (4,) if self.layout == "one pair" else (2, 2)}

    @property
    def is_event(self) -> bool:
        return self.event and len(self.shape) == 2


COUNTS = ("mask", "own mask", "inner mask", "scale", "constant scale")


def structures(seed: int, size: int) -> list[Structure]:
    """Random ones; every fifth must be refused."""
    rng = np.random.default_rng(seed)

    def structure(k):
        refused = k % 5 == 4
        counts = rng.permutation(COUNTS)[: rng.integers(0, 4)]
        return Structure(
            layout=LAYOUTS[k % len(LAYOUTS)],
            sites=str(rng.choice(SITES)) if refused or k % 3 else "none",
            link=LINKS[k // 5 % len(LINKS)] if refused else None,
            event=bool(rng.random() < 0.4),
            varying=bool(rng.random() < 0.5),
            counts=tuple(sorted(str(x) for x in counts)),
        )

    return [structure(k) for k in range(size)]


class Generated:
    """A model of a structure with random data."""

    def __init__(self, structure: Structure, seed: int) -> None:
        self.structure = structure
        self.data = _data(structure, np.random.default_rng([seed, 1]))
        self.model = partial(_write, structure)
        if structure.sites == "held intercept":
            self.model = handlers.condition(self.model, {"b": jnp.asarray(0.7)})


# Data


def _data(structure: Structure, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shape, P = structure.shape, 4
    rows = shape[0]
    data: dict[str, Any] = {
        "X": _features(structure, rng),
        "X2": _features(structure, rng),
        "offset": rng.normal(size=shape),
        "y": rng.normal(size=shape) * 2.0,
        "noise": rng.uniform(0.3, 1.5, shape) if structure.varying else rng.uniform(0.3, 1.5),
        "inclusion": rng.uniform(0.05, 0.9, P),
        "slab": rng.uniform(0.3, 2.0, P),
        "rows": rng.random(rows) < 0.8,
        "cells": rng.random(shape) < 0.8,
        "last": rng.random(shape[-1]) < 0.8,
        "row_scale": rng.uniform(0.4, 2.0, rows),
        "time": np.linspace(-1.0, 1.0, rows),
    }
    # one observation is always there
    data["rows"][0] = data["last"][0] = True
    data["cells"][(0,) * len(shape)] = True
    if rng.random() < 0.3:
        data["X"] = data["X"] * np.where(np.arange(data["X"].shape[-1]) == 0, 1e4, 1.0)
    missing = ~np.broadcast_to(_mask(structure, data), shape)
    if rng.random() < 0.5:
        data["y"] = np.where(missing, np.nan, data["y"])
        data["offset"] = np.where(missing, np.nan, data["offset"])
    return data


def _features(structure: Structure, rng: np.random.Generator) -> np.ndarray:
    rows = max(structure.shape)
    if structure.layout == "own features":
        return rng.normal(size=(2, rows, 2))
    return rng.normal(size=(rows, 2 if structure.layout.startswith("tasks") else 4))


def _aligned(x: Any, structure: Structure) -> Any:
    """An array with an entry for each row, with the axes of the observations."""
    return x.reshape(x.shape + (1,) * (len(structure.shape) - 1))


def _mask(structure: Structure, data: dict[str, Any]) -> np.ndarray:
    masks = {
        "mask": _aligned(data["rows"], structure),
        "own mask": data["cells"],
        "inner mask": data["last"],
    }
    mask = np.ones(structure.shape, bool)
    for name in masks.keys() & set(structure.counts):
        mask = mask & masks[name]
    return mask


# The model


def _sites(structure: Structure) -> dict[str, Any]:
    tasks = min(structure.shape) if len(structure.shape) == 2 else 1
    return _priors(structure.shape[0], tasks)[structure.sites]


def _write(structure: Structure, data: dict[str, Any]) -> None:
    values = {name: numpyro.sample(name, prior) for name, prior in _sites(structure).items()}
    weights = _weights(structure, data, values)
    location = _location(structure, data, values, weights)
    noise = data["noise"] * _noise_factor(structure, data, values)
    y, mask = data["y"], None
    flat = weights["w"].ravel()
    if structure.link == "own response":
        y = y + 1e-3 * flat[0]
    elif structure.link == "noise of weights":
        noise = noise * jnp.where(flat[0] > 1e6, 2.0, 1.0)
    elif structure.link == "mask of weights":
        mask = flat[0] < 1e6
    elif structure.link == "prior of weights":
        numpyro.sample("other", dist.Normal(flat[0], 1.0))
    likelihood: Any = dist.Normal(location, noise)
    if structure.link == "likelihood":
        likelihood = dist.Laplace(location, noise * jnp.exp(1e-3 * flat[0]))
    if "inner mask" in structure.counts:
        likelihood = likelihood.mask(data["last"])
    if "own mask" in structure.counts:
        likelihood = likelihood.mask(data["cells"])
    likelihood = likelihood.to_event(1) if structure.is_event else likelihood
    with ExitStack() as stack:
        for handler in _handlers(structure, data, values, mask):
            stack.enter_context(handler)
        numpyro.sample("y", likelihood, obs=y)


def _handlers(structure: Structure, data, values, mask) -> Iterator[Any]:
    def rows(x):
        return x if structure.is_event else _aligned(x, structure)

    if mask is not None:
        yield handlers.mask(mask=mask)
    if "mask" in structure.counts:
        yield handlers.mask(mask=rows(data["rows"]))
    if "scale" in structure.counts:
        yield handlers.scale(scale=rows(data["row_scale"]))
    if "constant scale" in structure.counts:
        yield handlers.scale(scale=0.5)
    if structure.sites == "mask switch":
        yield handlers.mask(mask=rows(jnp.asarray(data["time"]) > -0.5 + 0.1 * values["b"]))
    if structure.sites == "scale":
        yield handlers.scale(scale=values["s"])


def _weights(structure: Structure, data, values) -> dict[str, Any]:
    hyper = structure.sites == "hyperparameters"
    weights, start = {}, 0
    for name, shape in structure.pairs.items():
        end = start + int(np.prod(shape))
        prior = [data[part][start:end].reshape(shape) for part in ("inclusion", "slab")]
        with ExitStack() as stack:
            for dim, size in enumerate(reversed(shape), start=1):
                stack.enter_context(numpyro.plate(f"{name}_{dim}", size, dim=-dim))
            # another pair has numbers of its own
            prior = (values["pi"], values["t"]) if hyper and name == "w" else prior
            weights[name] = nss.spike_slab(name, *prior)
        start = end
    return weights


def _predict(structure: Structure, X, weights) -> Any:
    if structure.layout == "two pairs":
        return X[:, :3] @ weights["w"] + X[:, 3:] @ weights["v"]
    w = weights["w"]
    if structure.layout == "own features":
        return jnp.stack([X[0] @ w[0], X[1] @ w[1]], axis=-1)
    if structure.layout == "tasks":
        return X @ w.T
    return w @ X.T if structure.layout == "tasks first" else X @ w.reshape(-1)


def _mixed(structure: Structure, data, values, first, second) -> Any:
    """What other sites make of two predictions."""
    sites = structure.sites

    def by_row(x):
        return x.reshape(x.shape + (1,) * (first.ndim - 1))

    if sites == "gate":
        return values["z"] * first
    if sites == "switch":
        return jnp.where(values["b"] > 0.2, first, second)
    if sites == "steep switch":
        steps = 200.0 * (by_row(data["time"]) - values["b"])
        return first / (1.0 + jnp.exp(jnp.minimum(-steps, 700.0)))
    if sites == "assignment":
        return jnp.where(by_row(values["z"]) == 1, first, second)
    return by_row(values["g"]) * first if sites == "row gain" else first


def _location(structure: Structure, data, values, weights) -> Any:
    predictions = (_predict(structure, data[name], weights) for name in ("X", "X2"))
    location = _mixed(structure, data, values, *predictions)
    if structure.link in BENDS:
        location = BENDS[structure.link](location, values, weights["w"].ravel())
    if structure.sites in ("intercept", "held intercept"):
        location = location + values["b"]
    return data["offset"] + location


def _noise_factor(structure: Structure, data, values) -> Any:
    if structure.sites == "noise":
        return values["s"]
    if structure.sites == "noise of each":
        return values["s"][:, None] if structure.layout == "tasks first" else values["s"]
    if structure.sites == "noise switch":
        return jnp.where(_aligned(data["time"], structure) > values["b"], values["s"], 2.0)
    return 1.0
