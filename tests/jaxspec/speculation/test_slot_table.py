"""One table of columns: what a request fills in, what a call takes, and what rounds put back."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import MAX_BUDGET, SamplingParams
from jaxspec.speculation.slot_table import (
    COLUMNS,
    SlotTable,
    admit,
    column_names,
    empty_slots,
    filled_columns,
    put,
    take,
)

VOCAB = 40


@dataclass
class Asked:
    """What the table reads of a request."""

    prompt: list[int]
    generated: list[int]
    sampling: SamplingParams
    limit: int = 20
    seed: int = 7
    stop_ids: tuple[int, ...] = (3, 5)

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.generated


def table(slots: int = 4) -> SlotTable:
    return jax.tree.map(jnp.asarray, empty_slots(slots, VOCAB))


def test_every_column_is_declared_once() -> None:
    assert set(COLUMNS) == {field.name for field in fields(SlotTable)}
    assert set(column_names(per_token=True)) - set(column_names(per_token=False)) == {"in_prompt", "generated"}


def test_a_request_fills_its_row_and_no_other() -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        budget=5,
        min_tokens=3,
        repetition_penalty=1.5,
        logit_bias=((9, 1.5), (2, -4.0)),
        max_tokens=20,
    )
    request = Asked([1, 2, 2], [8, 8], sampling)
    rows = filled_columns([request], 2, VOCAB, per_token=True)
    found = {name: column[0].tolist() for name, column in rows.items()}
    assert (found["anchor"], found["length"], found["remaining"], found["finished"]) == (8, 4, 18, False)
    assert found["stop_ids"][:3] == [3, 5, -1]
    assert found["bias_ids"][:3] == [9, 2, -1]
    assert found["bias"][:3] == [1.5, -4.0, 0.0]
    assert found["min_length"] == 6
    assert (found["seed"], found["budget"]) == (7, 5)
    np.testing.assert_allclose([found["temperature"], found["top_p"], found["repetition"]], [0.7, 0.9, 1.5], rtol=1e-6)
    assert [token for token, seen in enumerate(found["in_prompt"]) if seen] == [1, 2]
    assert {token: count for token, count in enumerate(found["generated"]) if count} == {8: 2}
    empty = empty_slots(1, VOCAB)
    for name, column in rows.items():
        np.testing.assert_array_equal(column[1], getattr(empty, name)[0])


def test_greedy_requests_and_unset_budgets_have_their_own_values() -> None:
    rows = filled_columns([Asked([1], [], SamplingParams(temperature=1e-6))], 1, VOCAB, per_token=False)
    assert rows["temperature"][0] == 0
    assert rows["budget"][0] == MAX_BUDGET
    assert "generated" not in rows


def test_a_request_without_processors_undoes_what_the_slots_last_one_left() -> None:
    asked = Asked([1], [], SamplingParams(repetition_penalty=2.0, logit_bias=((4, 1.0),), presence_penalty=1.0))
    slots = np.array([2], np.int32)
    left = admit(table(), slots, filled_columns([asked], 1, VOCAB, per_token=True))
    assert float(left.repetition[2]) == 2.0
    after = admit(left, slots, filled_columns([Asked([1], [], SamplingParams())], 1, VOCAB, per_token=False))
    for name in ("repetition", "presence", "frequency", "bias", "bias_ids"):
        np.testing.assert_array_equal(getattr(after, name), getattr(table(), name))


def test_rows_of_slots_are_taken_and_what_rounds_change_is_put_back() -> None:
    whole = replace(table(), anchor=jnp.arange(4, dtype=jnp.int32), finished=jnp.zeros(4, bool))
    slots = jnp.array([2, 0, 4], jnp.int32)  # 4: no slot
    rows = take(whole, slots)
    assert rows.anchor[:2].tolist() == [2, 0]
    assert rows.finished.tolist() == [False, False, True]
    changed = replace(
        rows,
        anchor=jnp.array([20, 10, 99], jnp.int32),
        temperature=jnp.ones(3),
        generated=rows.generated.at[0, 5].set(1),
    )
    assert put(whole, slots, changed, per_token=False).anchor.tolist() == [10, 1, 20, 3]
    assert put(whole, slots, changed, per_token=False).temperature is whole.temperature, "no round changes it"
    assert put(whole, slots, changed, per_token=False).generated is whole.generated
    assert put(whole, slots, changed, per_token=True).generated[2, 5] == 1
