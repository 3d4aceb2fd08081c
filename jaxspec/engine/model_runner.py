"""The model runner: from requests to calls of compiled programs, and what comes back from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine.buckets import SMALLEST_CHUNK, SMALLEST_CONTEXT, bucket, smallest_that_holds
from jaxspec.engine.programs import DecodeShape, PrefillShape, Programs
from jaxspec.engine.request import Request, RoundCounts
from jaxspec.engine.scheduler import PromptPart
from jaxspec.engine.token_log_probs import TokenLogProb, host_log_probs
from jaxspec.model.families.protocols import CachedModule
from jaxspec.model.layers.cache import PagedCache, empty_cache
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.speculation.logits_processors import everything_allowed
from jaxspec.speculation.prefill import PromptChunk
from jaxspec.speculation.round import Batch, Caches, Carry, RoundResult
from jaxspec.speculation.sampling import mode_of
from jaxspec.speculation.slot_table import empty_slots, filled_columns, slot_specs


@dataclass(frozen=True)
class CacheSize:
    """The cache of one engine.

    Attributes:
      pages: in all.
      page_size: tokens of each.
      max_context: tokens that a request may reach.
    """

    pages: int
    page_size: int
    max_context: int

    def table_width(self, pages: int) -> int:
        """Pages of a table that holds so many, in a width that few programs are compiled for."""
        smallest = max(1, SMALLEST_CONTEXT // self.page_size)
        return bucket(pages, cdiv(self.max_context, self.page_size), smallest)


@dataclass(frozen=True)
class RoundTokens:
    """What one round brought for one request."""

    tokens: list[int]
    counts: RoundCounts
    log_probs: list[TokenLogProb]


@dataclass(frozen=True)
class PendingCall:
    """A decoding call that was dispatched.

    Attributes:
      result: on its way from the device; arrays have a leading axis of rounds.
      requests: in the order of the batch.
    """

    result: RoundResult
    requests: list[Request]

    @property
    def rounds(self) -> int:
        """Of the call."""
        return self.result.tokens.shape[0]

    @property
    def depth(self) -> int:
        """L, tokens drafted a round."""
        return self.result.tokens.shape[-1] - 1

    def read(self) -> list[tuple[Request, list[RoundTokens], bool]]:
        """Waits for the call; for each request, its rounds that produced tokens and whether it ended with them."""
        result = jax.tree.map(np.asarray, self.result)
        return [
            (request, self._rounds_of(result, place), bool(result.finished[-1, place]))
            for place, request in enumerate(self.requests)
        ]

    def _rounds_of(self, result: RoundResult, place: int) -> list[RoundTokens]:
        rounds = []
        top = self.requests[place].sampling.log_probs
        for index in np.flatnonzero(result.count[:, place]):
            counts = RoundCounts(*(int(x[index, place]) for x in (result.count, result.accepted, result.drafted)))
            tokens = result.tokens[index, place, : counts.produced].tolist()
            log_probs: list[TokenLogProb] = []
            if top is not None:
                of_round = jax.tree.map(lambda array, index=index: array[index], result.log_probs)
                log_probs = host_log_probs(of_round, place, tokens, top)
            rounds.append(RoundTokens(tokens, counts, log_probs))
        return rounds


class ModelRunner:
    """Owns the mesh, the weights, the compiled programs, and the carry that goes from call to call.

    Args:
      programs: over mesh and weights.
      config: sizes.
      cache: its size.
    """

    def __init__(self, programs: Programs, config: EngineConfig, cache: CacheSize):
        self.programs, self.cache, self._config = programs, cache, config
        target, drafter = programs.target, programs.drafter
        self._vocab = target.config.vocab_size
        dtype = programs.leaves[0].dtype

        def pools(module: CachedModule | None) -> PagedCache:
            if module is None:
                return ()
            return empty_cache(module.cache_rows, cache.pages, cache.page_size, module.layout, programs.mesh, dtype)

        slots = programs.place(empty_slots(config.slots, self._vocab), slot_specs(target.layout))
        self.carry = Carry(Caches(pools(target), pools(drafter)), slots)

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        """Processes parts of prompts; requests that want their prompt's log-probabilities get them, still under way."""
        batch = smallest_that_holds(len(parts), self._config.batch_sizes)
        longest = max(part.count for part in parts)
        length = bucket(longest, self._config.prefill_chunk, SMALLEST_CHUNK)
        tokens, following = np.zeros((2, batch, length), np.int32)
        start, count = np.zeros((2, batch), np.int32)
        for place, part in enumerate(parts):
            sequence, end = part.request.sequence, part.start + part.count
            start[place], count[place] = part.start, part.count
            tokens[place, : part.count] = sequence[part.start : end]
            following[place, : part.count] = sequence[part.start + 1 : end + 1]
        table = self._page_table([part.request for part in parts], batch)
        asked = any(part.request.awaits_prompt_log_probs for part in parts)
        shape = PrefillShape(batch, table.shape[1], length, asked)
        arrays: dict[str, Any] = {"tokens": tokens, "following": following, "start": start, "count": count}
        chunk = PromptChunk(page_table=table, **arrays)
        self.carry, log_probs = self.programs.prefill(shape, self.carry, chunk)
        for place, part in enumerate(parts):
            if part.request.awaits_prompt_log_probs:
                part.request.prompt_rows.append((log_probs, place, following[place, : part.count].tolist()))

    def admit(self, requests: Sequence[Request]) -> None:
        """Tells the device about requests whose context is in the cache.

        Those that change logits bring columns as wide as the vocabulary, and come one by one.
        """
        wide = [request for request in requests if request.sampling.processes_logits]
        if narrow := [request for request in requests if not request.sampling.processes_logits]:
            self._admit(narrow, self._config.slots, per_token=False)
        for request in wide:
            self._admit([request], 1, per_token=True)

    def decode(self, requests: list[Request], speculation: SpeculationConfig) -> PendingCall:
        """Dispatches one call for requests that decode."""
        batch = self._batch(requests)
        mode = mode_of(request.sampling for request in requests)
        shape = DecodeShape(batch.slots.shape[0], batch.page_table.shape[1], mode, speculation)
        if any(request.matcher is not None for request in requests):
            result = self._guided_round(shape, requests, batch)
        else:
            self.carry, result = self.programs.decode(shape, self.carry, batch)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        return PendingCall(result, requests)

    def _guided_round(self, shape: DecodeShape, requests: list[Request], batch: Batch) -> RoundResult:
        """One round in three programs; the host makes the grammars' masks while the target's pass runs."""
        tree = self.programs.draft(shape, self.carry, batch)
        verified = self.programs.verify(shape, self.carry, batch, tree)
        tokens, parents, valid = (np.asarray(x) for x in (tree.tokens, tree.parents, tree.valid))
        words = cdiv(self._vocab, 32)
        allowed = np.full((*tokens.shape, words), 2**32 - 1, np.uint32)
        for place, request in enumerate(requests):
            if request.matcher is not None:
                allowed[place] = request.matcher.allowed(tokens[place], parents[place], valid[place])
        batch = replace(batch, allowed=allowed)  # type: ignore[arg-type]
        self.carry, result = self.programs.accept_and_commit(shape, self.carry, batch, verified)
        return result

    def _batch(self, requests: Sequence[Request]) -> Batch:
        """The requests of a decoding call, as arrays; the places past the last one are nobody's."""
        size = smallest_that_holds(len(requests), self._config.batch_sizes)
        slots = np.full(size, self._config.slots, np.int32)
        capacity = np.zeros(size, np.int32)
        for place, request in enumerate(requests):
            slots[place] = request.taken_slot
            capacity[place] = len(request.pages) * self.cache.page_size
        arrays: dict[str, Any] = {"slots": slots, "capacity": capacity, "allowed": everything_allowed(size)}
        return Batch(page_table=self._page_table(requests, size), **arrays)

    def _page_table(self, requests: Sequence[Request], batch: int) -> Any:
        """Their pages, int32 [batch, pages]."""
        width = self.cache.table_width(max(len(request.pages) for request in requests))
        table = np.full((batch, width), self.cache.pages, np.int32)  # one past the last page: nobody's
        for place, request in enumerate(requests):
            table[place, : len(request.pages)] = request.pages
        return table

    def _admit(self, requests: Sequence[Request], count: int, *, per_token: bool) -> None:
        slots = np.full(count, self._config.slots, np.int32)
        slots[: len(requests)] = [request.taken_slot for request in requests]
        columns = filled_columns(requests, count, self._vocab, per_token=per_token)
        table = self.programs.admit(self.carry.slots, slots, columns)
        self.carry = Carry(self.carry.caches, table)
