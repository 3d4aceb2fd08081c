"""Division that rounds up, of numbers and of arrays."""

import math

import jax.numpy as jnp

from jaxspec.sharding.arithmetic import cdiv


def test_the_quotient_is_rounded_up():
    for dividend in range(20):
        for divisor in range(1, 7):
            assert cdiv(dividend, divisor) == math.ceil(dividend / divisor)


def test_arrays_are_divided_element_by_element():
    found = cdiv(jnp.array([0, 1, 8, 9]), 8)
    assert found.dtype == jnp.int32
    assert found.tolist() == [0, 1, 1, 2]
