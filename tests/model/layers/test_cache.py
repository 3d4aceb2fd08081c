"""Paged reads and writes against a plain Python model of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.model.layers.cache import RowSpec, context_rows, empty_cache, write_rows
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.mesh import make_mesh

PAGES, BATCH, WIDTH, ROWS = 7, 2, 3, 4


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_kept_rows_land_at_their_positions_and_nothing_else_changes(seed: int, page_size: int) -> None:
    rng = np.random.default_rng(seed)
    owned = rng.permutation(PAGES)[: BATCH * WIDTH].reshape(BATCH, WIDTH)
    held = rng.integers(0, WIDTH + 1, BATCH)  # pages each sequence really has
    table = np.where(np.arange(WIDTH) < held[:, None], owned, PAGES).astype(np.int32)
    before = rng.normal(size=(PAGES, page_size, 2)).astype(np.float32)
    rows = rng.normal(size=(BATCH, ROWS, 2)).astype(np.float32)
    start = rng.integers(0, WIDTH * page_size + 1, BATCH)
    positions = (start[:, None] + np.arange(ROWS)).astype(np.int32)  # some past the table
    keep = rng.random((BATCH, ROWS)) < 0.6

    pool = jnp.asarray(before)
    ((after, twice),) = jax.jit(write_rows)(((pool, pool),), ((rows, 2 * rows),), table, positions, keep)

    expected, doubled = before.copy(), before.copy()
    for sequence in range(BATCH):
        for row in range(ROWS):
            page, place = divmod(int(positions[sequence, row]), page_size)
            if keep[sequence, row] and page < held[sequence]:
                expected[table[sequence, page], place] = rows[sequence, row]
                doubled[table[sequence, page], place] = 2 * rows[sequence, row]
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(twice, doubled)

    gathered = np.asarray(context_rows(jnp.asarray(after), jnp.asarray(table)))
    for sequence in range(BATCH):
        for position in range(held[sequence] * page_size):
            page, place = divmod(position, page_size)
            np.testing.assert_array_equal(gathered[sequence, position], expected[table[sequence, page], place])


def test_a_module_without_a_cache_writes_none() -> None:
    zeros = jnp.zeros((1, 1), jnp.int32)
    assert write_rows((), (), zeros, zeros, zeros == 0) == ()


def test_rows_are_rounded_to_the_dtype_of_the_pool() -> None:
    pool = jnp.zeros((1, 1, 1), jnp.bfloat16)
    zeros = jnp.zeros((1, 1), jnp.int32)
    ((written,),) = write_rows(((pool,),), ((jnp.full((1, 1, 1), 1 / 3),),), zeros, zeros, zeros == 0)
    assert written.dtype == jnp.bfloat16
    assert written[0, 0, 0] == jax.lax.convert_element_type(1 / 3, jnp.bfloat16)


def test_bfloat16_is_kept_as_bits_where_there_is_no_scatter_of_it() -> None:
    ((pool,),) = empty_cache(((RowSpec((2,), (None,)),),), 2, 1, Layout(1, ()), make_mesh(1), jnp.bfloat16)
    assert pool.dtype == jnp.uint16
    table, keep = np.array([[1]], np.int32), np.array([[True]])
    rows = jnp.array([[[1 / 3, -jnp.inf]]])
    ((written,),) = write_rows(((pool,),), ((rows,),), table, np.array([[0]], np.int32), keep)
    found = context_rows(written, table)
    assert found.dtype == jnp.bfloat16
    assert (found == rows.astype(jnp.bfloat16)).all()
    assert not written[0].any()
