"""Figures and their intervals, against planted numbers and known distributions."""

import math
import random

import numpy as np
import pytest

from paceline.bench.histogram import Histogram
from paceline.bench.statistics import (
    mean_figure,
    quantile_figure,
    ratio_figure,
    share_figure,
    student_t,
    summarise,
)


def test_a_mean_has_students_interval():
    figure = mean_figure([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (figure.value, figure.low, figure.high) == pytest.approx((3, 3 - half, 3 + half))


def test_students_factor_beyond_the_table_is_exact_to_a_thousandth():
    for degrees, factor in ((11, 2.201), (20, 2.086), (60, 2.000), (1000, 1.962)):
        assert student_t(degrees) == pytest.approx(factor, rel=1e-3)


def test_nothing_is_averaged_from_nothing():
    assert summarise([]) == {"count": 0}
    assert summarise([math.nan, math.inf]) == {"count": 0}
    assert Histogram().summary() == {"count": 0}


def test_a_deviation_is_the_samples_and_unknown_of_one_value():
    summary = summarise([2.0, 4.0, 9.0], 1e3)
    assert (summary["std"], summary["min"]) == (pytest.approx(1e3 * math.sqrt(13)), 2000)
    one = Histogram()
    one.add(np.array([0.5]))
    for alone in (summarise([0.5]), one.summary()):
        assert (alone["std"], alone["min"], alone["p99"]["value"]) == (None, 0.5, 0.5)


def test_values_that_are_missing_are_left_out():
    summary = summarise([1.0, math.nan, 3.0], 1e3)
    assert (summary["count"], summary["mean"]["value"], summary["max"]) == (2, 2000, 3000)


def test_a_median_lies_between_the_ranks_of_the_binomial():
    figure = quantile_figure(np.arange(1.0, 101.0), 0.5)
    assert (figure.value, figure.low, figure.high) == (50.5, 40, 61)  # the tables' ranks for n=100


def test_the_mean_of_durations_has_no_interval_below_zero():
    assert summarise([0.8, 5.1])["mean"]["low"] == 0
    assert summarise([-1.0, 5.1])["mean"]["low"] < 0


def test_a_tail_beyond_the_sample_is_unbounded_and_says_so():
    figure = quantile_figure(np.arange(1.0, 21.0), 0.99)
    assert figure.high is None
    assert figure.low is not None


@pytest.mark.parametrize("size", [200, 3000])
def test_quantile_intervals_hold_the_truth_as_often_as_they_say(size):
    rng = np.random.default_rng(1)
    truth = math.log(10)  # the 0.9 quantile of an exponential
    held = 0
    for _ in range(200):
        figure = quantile_figure(np.sort(rng.exponential(size=size)), 0.9)
        held += figure.low <= truth <= figure.high
    assert 180 <= held <= 200


def test_a_share_has_wilsons_interval():
    figure = share_figure(40, 60)
    assert (figure.value, figure.low, figure.high) == pytest.approx(
        (2 / 3, 0.5406, 0.7727), abs=1e-3
    )
    assert share_figure(20, 20).low == pytest.approx(0.839, abs=1e-3)


def test_a_ratio_is_the_geometric_mean_over_rounds():
    figure = ratio_figure([(2.0, 1.0), (8.0, 1.0)])
    assert figure.value == pytest.approx(4)
    assert ratio_figure([(1.0, 0.0)]) is None
    same = ratio_figure([(3.0, 2.0)] * 4)
    assert (same.low, same.high) == pytest.approx((1.5, 1.5))


def test_a_histogram_agrees_with_the_exact_figures_within_half_a_percent():
    rng = random.Random(2)
    halves, values = (Histogram(), Histogram()), []
    for number in range(300):
        request = [rng.lognormvariate(-4, 0.7) for _ in range(40)]
        halves[number % 2].add(np.array(request))
        values += request
    histogram = Histogram()
    for half in halves:
        histogram.take(half)
    exact, binned = summarise(values, 1e3), histogram.summary(1e3)
    assert binned["count"] == exact["count"]
    assert (binned["min"], binned["max"]) == (exact["min"], exact["max"])
    assert binned["std"] == pytest.approx(exact["std"], rel=1e-9)
    assert binned["mean"]["value"] == pytest.approx(exact["mean"]["value"], rel=1e-9)
    for name in ("p50", "p90", "p95", "p99"):
        assert binned[name]["value"] == pytest.approx(exact[name]["value"], rel=0.005)


def test_a_histograms_interval_takes_requests_not_tokens_as_independent():
    rng = np.random.default_rng(3)
    histogram = Histogram()
    truth, held = 0.05, 0
    for _ in range(100):
        histogram = Histogram()
        for _ in range(60):  # a request's gaps are all alike: 60 draws, not 60 x 50
            histogram.add(np.full(50, truth * rng.uniform(0.5, 1.5)))
        mean = histogram.summary()["mean"]
        held += mean["low"] <= truth <= mean["high"]
    assert held >= 88


@pytest.mark.parametrize(("requests", "gaps"), [(5, 15), (40, 30)])
def test_quantiles_of_gaps_hold_the_truth_as_often_as_they_say(requests, gaps):
    """The gaps of a request are alike, and a few are long: of a short run, hardly one."""
    rng = np.random.default_rng(4)

    def draw() -> np.ndarray:
        drawn = rng.uniform(0.5, 1.5) * rng.gamma(4, 0.0025, gaps)
        drawn[rng.random(gaps) < 0.02] += rng.uniform(0.05, 0.3)
        return drawn

    names = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    many = np.concatenate([draw() for _ in range(10_000)])
    held = dict.fromkeys(names, 0)
    for _ in range(100):
        histogram = Histogram()
        for _ in range(requests):
            histogram.add(draw())
        figures = histogram.summary()
        for name, q in names.items():
            low, high = figures[name]["low"], figures[name]["high"]
            truth = np.quantile(many, q)
            held[name] += (low or 0.0) <= 1.0025 * truth
            held[name] -= high is not None and high < 0.9975 * truth
    assert min(held.values()) >= 92, held


def test_the_p99_of_a_few_gaps_is_unbounded_and_says_so():
    histogram = Histogram()
    for _ in range(3):
        histogram.add(np.array([0.008, 0.009, 0.012, 0.008]))
    figures = histogram.summary()
    assert figures["p99"]["high"] is None
    assert figures["p50"]["low"] is not None


def test_a_histogram_keeps_its_size():
    histogram = Histogram()
    size = histogram._counts.nbytes
    for _ in range(200):
        histogram.add(np.full(5000, 0.01))
    assert histogram.count == 1_000_000
    assert histogram._counts.nbytes == size
