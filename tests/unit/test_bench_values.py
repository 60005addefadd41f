"""What `paceline bench` accepts, and what it refuses by name."""

import math

import pytest

from paceline.cli.bench_values import read_limits, read_price
from paceline.errors import ParameterError


def limits(**changes):
    given = {"requests": None, "duration": None, "warmup": "0", "drain": "0s", "timeout": "600s"}
    return read_limits(**{**given, **changes}, arrival="poisson", is_search=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("duration", "0s"), ("timeout", "0ms"), ("duration", "99999999h"), ("drain", "soon"),
        ("warmup", "1000001"), ("warmup", "9" * 5000), ("warmup", "-1s"),
    ],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused_by_name(name, text):
    with pytest.raises(ParameterError, match=f"--{name} is "):
        limits(**{name: text})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_price_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(ParameterError, match="--price is"):
        read_price(value, None)
    with pytest.raises(ParameterError, match="--watts is"):
        read_price(1.0, value)
