# SPDX-License-Identifier: Apache-2.0
"""Advice to try another likelihood: how often on responses of the right one, and of others."""

import numpy as np
import pytest

from numpyro_spikeslab.models.responses import FALSE_ALARM, RESPONSES, Fitted

SIZES = [5, 30, 300]


def share(name, draw, num_obs, number=300):
    """Compute the share of data sets that get an advice, and the last advice."""
    rng = np.random.default_rng(num_obs)
    texts = []
    for _ in range(number):
        y, predictor = draw(rng, num_obs)
        weights = np.ones(num_obs)
        texts.append(RESPONSES[name].advice(Fitted(1.0 * y, predictor, weights, weights)))
    given = [text for text in texts if text]
    return len(given) / number, given[-1] if given else ""


def normal(rng, n):
    return 1e3 + 7.0 * rng.normal(size=n), np.full(n, 1e3)


def least_squares(rng, n):
    X, y = rng.normal(size=(n, min(n // 2, 15))), rng.normal(size=n)
    return y, X @ np.linalg.lstsq(X, y, rcond=None)[0]


def poisson(mean):
    def draw(rng, n):
        f = np.log(mean) + 0.5 * rng.normal(size=n)
        return rng.poisson(np.exp(f)), f

    return draw


def classes(rng, n):
    f = 2.5 * rng.normal(size=n)
    return rng.random(n) < 1 / (1 + np.exp(-f)), f


RIGHT = {
    "normal": ("normal", normal),
    "least squares": ("normal", least_squares),
    "rare counts": ("poisson", poisson(0.05)),
    "counts": ("poisson", poisson(3.0)),
    "many counts": ("poisson", poisson(1e4)),
    "classes": ("logit", classes),
}


@pytest.mark.parametrize("num_obs", SIZES)
@pytest.mark.parametrize("case", RIGHT)
def test_the_right_likelihood_gets_no_advice(case, num_obs):
    rate, text = share(*RIGHT[case], num_obs)
    assert rate <= FALSE_ALARM, text


def heavy(rng, n):
    return rng.standard_t(2, size=n), np.zeros(n)


def more_variance(rng, n):
    mean = np.full(n, 5.0)
    return rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, size=n)), np.log(mean)


def separated(rng, n):
    f = rng.normal(size=n)
    return f > 0, 10.0 * f


WRONG = {
    "heavy tails": ("normal", heavy, "'student'"),
    "more variance": ("poisson", more_variance, "'negative_binomial'"),
    "separation": ("logit", separated, "`always`"),
    "separation of probits": ("probit", separated, "`always`"),
    "separation of trials": ("binomial", separated, "`always`"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_likelihood_gets_one(case):
    name, draw, expected = WRONG[case]
    rate, text = share(name, draw, 300, 30)
    assert rate > 0.9 and expected in text


def test_weights_are_counts_or_precisions():
    rng = np.random.default_rng(0)
    y, f = more_variance(rng, 10)
    once, often = (Fitted(1.0 * y, f, np.full(10, w), np.ones(10)) for w in (0.1, 30.0))
    assert not RESPONSES["poisson"].advice(once) and RESPONSES["poisson"].advice(often)
    weights = np.exp(3 * rng.normal(size=300))
    noise = rng.normal(size=300) / np.sqrt(weights)
    zeros, ones = np.zeros(300), np.ones(300)
    assert RESPONSES["normal"].advice(Fitted(noise, zeros, ones, ones))
    assert not RESPONSES["normal"].advice(Fitted(noise, zeros, ones, weights))
    # rows that count often are as many rows
    noise, counts = rng.normal(size=300), 1.0 + np.arange(300) % 10
    for y in noise, heavy(rng, 300)[0]:
        index = np.repeat(np.arange(300), counts.astype(int))
        repeated = Fitted(*(x[index] for x in (y, zeros, ones, ones)))
        text = RESPONSES["normal"].advice(Fitted(y, zeros, counts, ones))
        assert text == RESPONSES["normal"].advice(repeated) and bool(text) == (y is not noise)
    exact = Fitted(np.arange(5.0), np.arange(5.0), np.ones(5), np.ones(5))
    assert not RESPONSES["normal"].advice(exact)
