"""What the device knows of every slot between calls: one table, an entry a slot, its columns declared once.

The host fills entries in when it admits a request; a call takes those of its batch, a round changes some of their
columns, and these are put back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.config import MAX_BIASES, MAX_BUDGET, MAX_STOP_IDS, SamplingParams
from jaxspec.sharding.layout import Layout

VOCAB = "vocab"  # The logical axis of a column that has an entry for each token; split as the logits are.


class AdmittedRequest(Protocol):
    """What the table reads of a request whose context is in the cache."""

    prompt: list[int]
    generated: list[int]
    sampling: SamplingParams
    limit: int
    seed: int
    stop_ids: tuple[int, ...]

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer so far; its last token is the anchor."""


@dataclass(frozen=True)
class Column:
    """How a column is made.

    Attributes:
      dtype: of its entries.
      default: what a slot without a request has.
      fill: writes a request's value into its entry, which holds the default.
      shape: of one entry; `VOCAB` stands for the size of the vocabulary.
      changes: whether rounds write it.
    """

    dtype: Any
    default: Any
    fill: "Fill"
    shape: tuple[int | str, ...] = ()
    changes: bool = False

    @property
    def per_token(self) -> bool:
        """Whether an entry spans the vocabulary; only the programs of requests that ask for it touch such a column."""
        return VOCAB in self.shape

    def empty(self, count: int, vocab: int) -> np.ndarray:
        """`count` entries without requests."""
        sizes = tuple(size if isinstance(size, int) else vocab for size in self.shape)
        return np.full((count, *sizes), self.default, self.dtype)


Fill = Callable[[np.ndarray, AdmittedRequest], None]


def column(dtype: Any, default: Any, fill: Fill, **more: Any) -> dict[str, Column]:
    """A field's metadata; the arguments are `Column`'s."""
    return {"column": Column(dtype, default, fill, **more)}


def value(of: Callable[[AdmittedRequest], Any]) -> Fill:
    """Fills an entry with one value."""

    def fill(entry: np.ndarray, request: AdmittedRequest) -> None:
        entry[...] = of(request)

    return fill


def values(of: Callable[[AdmittedRequest], Sequence[Any]]) -> Fill:
    """Fills the first places of an entry; the rest keeps the default."""

    def fill(entry: np.ndarray, request: AdmittedRequest) -> None:
        found = of(request)
        entry[: len(found)] = found

    return fill


def _remaining(request: AdmittedRequest) -> int:
    return request.limit - len(request.generated)


def _temperature(request: AdmittedRequest) -> float:
    return 0.0 if request.sampling.greedy else request.sampling.temperature


def _budget(request: AdmittedRequest) -> int:
    return MAX_BUDGET if request.sampling.budget is None else request.sampling.budget


def _min_length(request: AdmittedRequest) -> int:
    return len(request.prompt) + request.sampling.min_tokens


def _bias_ids(request: AdmittedRequest) -> list[int]:
    return [token for token, _ in request.sampling.logit_bias]


def _biases(request: AdmittedRequest) -> list[float]:
    return [bias for _, bias in request.sampling.logit_bias]


def _mark_prompt(entry: np.ndarray, request: AdmittedRequest) -> None:
    entry[request.prompt] = True


def _count_answer(entry: np.ndarray, request: AdmittedRequest) -> None:
    np.add.at(entry, request.generated, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """One entry a slot, or, within a call, one for each request of the batch.

    Attributes:
      anchor: the newest committed token; the target has not processed it yet.
      length: context tokens whose rows are cached; also the anchor's position.
      remaining: tokens that the request may still produce.
      finished: stopped or at its limit.
      stop_ids: padded with -1.
      temperature, top_p, min_p: 0, 1 and 0 choose the most probable token and leave none out.
      top_k: 0 for all.
      budget: tree nodes that count, at most.
      seed, choice: with the token's position they key the noise.
      repetition: divides (or multiplies, below 0) the logits of tokens in prompt or answer; 1 is none.
      presence: subtracted once from the logits of tokens in the answer.
      frequency: subtracted from the logits of tokens once for each time they are in the answer.
      min_length: the first position that a stop token may have.
      bias_ids: padded with -1.
      bias: added to the logits of `bias_ids`.
      in_prompt: whether each token is in the prompt.
      generated: how often each token is in the answer.
    """

    anchor: jax.Array = field(metadata=column(np.int32, 0, value(lambda r: r.sequence[-1]), changes=True))
    length: jax.Array = field(metadata=column(np.int32, 0, value(lambda r: len(r.sequence) - 1), changes=True))
    remaining: jax.Array = field(metadata=column(np.int32, 0, value(_remaining), changes=True))
    finished: jax.Array = field(metadata=column(bool, True, value(lambda r: False), changes=True))
    stop_ids: jax.Array = field(metadata=column(np.int32, -1, values(lambda r: r.stop_ids), shape=(MAX_STOP_IDS,)))
    temperature: jax.Array = field(metadata=column(np.float32, 0, value(_temperature)))
    top_p: jax.Array = field(metadata=column(np.float32, 1, value(lambda r: r.sampling.top_p)))
    min_p: jax.Array = field(metadata=column(np.float32, 0, value(lambda r: r.sampling.min_p)))
    top_k: jax.Array = field(metadata=column(np.int32, 0, value(lambda r: r.sampling.top_k)))
    budget: jax.Array = field(metadata=column(np.int32, MAX_BUDGET, value(_budget)))
    seed: jax.Array = field(metadata=column(np.uint32, 0, value(lambda r: r.seed)))
    choice: jax.Array = field(metadata=column(np.int32, 0, value(lambda r: r.sampling.choice)))
    repetition: jax.Array = field(metadata=column(np.float32, 1, value(lambda r: r.sampling.repetition_penalty)))
    presence: jax.Array = field(metadata=column(np.float32, 0, value(lambda r: r.sampling.presence_penalty)))
    frequency: jax.Array = field(metadata=column(np.float32, 0, value(lambda r: r.sampling.frequency_penalty)))
    min_length: jax.Array = field(metadata=column(np.int32, 0, value(_min_length)))
    bias_ids: jax.Array = field(metadata=column(np.int32, -1, values(_bias_ids), shape=(MAX_BIASES,)))
    bias: jax.Array = field(metadata=column(np.float32, 0, values(_biases), shape=(MAX_BIASES,)))
    in_prompt: jax.Array = field(metadata=column(bool, False, _mark_prompt, shape=(VOCAB,)))
    generated: jax.Array = field(metadata=column(np.uint16, 0, _count_answer, shape=(VOCAB,), changes=True))


COLUMNS: dict[str, Column] = {one.name: one.metadata["column"] for one in dataclasses.fields(SlotTable)}


def column_names(*, per_token: bool) -> tuple[str, ...]:
    """The columns of a program: with or without those that span the vocabulary."""
    return tuple(name for name, column in COLUMNS.items() if per_token or not column.per_token)


def empty_slots(slots: int, vocab: int) -> SlotTable:
    """A table without requests, as NumPy arrays."""
    columns: dict[str, Any] = {name: column.empty(slots, vocab) for name, column in COLUMNS.items()}
    return SlotTable(**columns)


def slot_specs(layout: Layout) -> SlotTable:
    """How the columns are split over the mesh: those over the vocabulary as the target's logits are."""
    specs: dict[str, Any] = {
        name: layout.spec((None, *(VOCAB if size == VOCAB else None for size in column.shape)))
        for name, column in COLUMNS.items()
    }
    return SlotTable(**specs)


def filled_columns(
    requests: Sequence[AdmittedRequest], count: int, vocab: int, *, per_token: bool
) -> dict[str, np.ndarray]:
    """The columns of requests about to decode, `count` entries each; those past the last request are empty.

    Args:
      per_token: whether to fill in the columns that span the vocabulary, too.
    """
    columns = {name: COLUMNS[name].empty(count, vocab) for name in column_names(per_token=per_token)}
    for name, entries in columns.items():
        for place, request in enumerate(requests):
            COLUMNS[name].fill(entries[place, ...], request)
    return columns


def admit(table: SlotTable, slots: jax.Array, columns: dict[str, jax.Array]) -> SlotTable:
    """Writes columns of the requests that take over `slots`, int32 [requests]; a slot past the last is nobody's."""
    return dataclasses.replace(
        table, **{name: getattr(table, name).at[slots].set(column, mode="drop") for name, column in columns.items()}
    )


def take(table: SlotTable, slots: jax.Array) -> SlotTable:
    """The entries of `slots`, int32 [batch]; a slot past the last gives a finished one."""
    taken = jax.tree.map(lambda column: column.at[slots].get(mode="clip"), table)
    return dataclasses.replace(taken, finished=taken.finished | (slots >= table.finished.shape[0]))


def put(table: SlotTable, slots: jax.Array, changed: SlotTable, *, per_token: bool) -> SlotTable:
    """Writes back the columns that rounds change; those of a slot past the last are dropped."""
    names = [name for name in column_names(per_token=per_token) if COLUMNS[name].changes]
    return admit(table, slots, {name: getattr(changed, name) for name in names})
