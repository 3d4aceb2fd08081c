"""A `ForwardBatch` whose fields do not fit fails while the program is traced, naming the field."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxspec.model.layers.batch import ForwardBatch
from tests.support.builders import on_mesh, tiny_target

SHAPES = {
    "tokens": ((2, 3), jnp.int32),
    "positions": ((2, 3), jnp.int32),
    "page_table": ((2, 5), jnp.int32),
    "context_length": ((2,), jnp.int32),
    "visibility": ((2, 3, 3), jnp.bool_),
}


def good() -> ForwardBatch:
    return ForwardBatch(**{name: jax.ShapeDtypeStruct(*of) for name, of in SHAPES.items()})


def trace(batch: ForwardBatch) -> None:
    target = tiny_target()
    cache = tuple(
        tuple(jax.ShapeDtypeStruct((4, 2, *r.shape), jnp.float32) for r in layer) for layer in target.cache_rows
    )
    jax.eval_shape(on_mesh(1, target, lambda module, batch, cache: module(batch, cache, ())), batch, cache)


def test_the_right_fields_pass() -> None:
    good().check()
    trace(good())


@pytest.mark.parametrize("field", SHAPES)
@pytest.mark.parametrize("fault", ["missing", "rank", "size", "dtype"])
def test_a_field_that_does_not_fit_is_named(field: str, fault: str) -> None:
    shape, dtype = SHAPES[field]
    wrong = {
        "missing": None,
        "rank": jax.ShapeDtypeStruct((*shape, 1), dtype),
        "size": jax.ShapeDtypeStruct((shape[0] + 1, *shape[1:]), dtype),
        "dtype": jax.ShapeDtypeStruct(shape, jnp.float32),
    }[fault]
    # Tokens give batch and rows; where they have another size, it is the next field that does not fit.
    named = "positions" if (field, fault) == ("tokens", "size") else field
    found = "None" if wrong is None else f"{jnp.dtype((wrong if named == field else good().positions).dtype).name}["
    with pytest.raises(ValueError, match=rf"ForwardBatch\.{named}: found {re.escape(found)}.*expected .*\["):
        trace(replace(good(), **{field: wrong}))
