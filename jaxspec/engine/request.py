"""A request inside the engine, and what comes out of it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxspec.config import SamplingParams
from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.token_log_probs import TokenLogProb, host_log_probs

if TYPE_CHECKING:
    from jaxspec.engine.grammar import GrammarMatcher
    from jaxspec.speculation.log_probs import LogProbRows


@dataclass
class RequestStatistics:
    """What speculation did for one request.

    Attributes:
      rounds: target passes that produced a token.
      produced: tokens.
      drafted: tree nodes verified.
      accepted_lengths: how many rounds accepted exactly d drafted tokens, at index d.
      cached_tokens: of the prompt, found in the cache.
    """

    rounds: int = 0
    produced: int = 0
    drafted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    def record(self, counts: "RoundCounts", depth: int) -> None:
        """Adds one round of a drafter that drafts `depth` tokens."""
        self.accepted_lengths += [0] * (depth + 1 - len(self.accepted_lengths))
        self.rounds += 1
        self.produced += counts.produced
        self.drafted += counts.drafted
        self.accepted_lengths[counts.accepted] += 1

    def merge(self, other: "RequestStatistics") -> None:
        """Adds another request's numbers."""
        self.accepted_lengths += [0] * (len(other.accepted_lengths) - len(self.accepted_lengths))
        self.rounds += other.rounds
        self.produced += other.produced
        self.drafted += other.drafted
        self.cached_tokens += other.cached_tokens
        for depth, rounds in enumerate(other.accepted_lengths):
            self.accepted_lengths[depth] += rounds

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(depth * rounds for depth, rounds in enumerate(self.accepted_lengths))

    @property
    def tau(self) -> float:
        """τ, tokens committed per target pass."""
        return self.produced / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of rounds that accepted at least d drafted tokens, for d = 1, 2, …"""
        return [sum(self.accepted_lengths[d:]) / self.rounds for d in range(1, len(self.accepted_lengths))]


@dataclass(frozen=True)
class RoundCounts:
    """One round of one request: tokens it produced, drafted tokens among them, tree nodes verified."""

    produced: int
    accepted: int
    drafted: int


@dataclass(frozen=True)
class RequestOutput:
    """What one step brought for one request.

    Attributes:
      tokens: the new ones.
      finish_reason: with the last output; else None.
      statistics: with the last output.
      rounds: that produced the tokens, in order.
      log_probs: of `tokens`, where the request asked for them.
      prompt_log_probs: of the prompt's tokens from the second on, with the first output, where asked for.
      cached_tokens: of the prompt, found in the cache.
      queued_seconds: it waited for a slot, with the first output.
    """

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    statistics: RequestStatistics | None = None
    rounds: tuple[RoundCounts, ...] = ()
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    cached_tokens: int = 0
    queued_seconds: float | None = None


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is: requests in slots and waiting, cache pages in use and there."""

    running: int
    waiting: int
    pages_used: int
    pages: int


@dataclass(frozen=True)
class Completion:
    """A request's whole answer."""

    tokens: list[int]
    finish_reason: FinishReason
    statistics: RequestStatistics
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)

    @classmethod
    def joined(cls, outputs: Sequence[RequestOutput]) -> "Completion":
        """The outputs of one request, the last one included."""
        last = outputs[-1]
        assert last.finish_reason is not None
        assert last.statistics is not None
        return cls(
            tokens=[token for output in outputs for token in output.tokens],
            finish_reason=last.finish_reason,
            statistics=last.statistics,
            log_probs=[entry for output in outputs for entry in output.log_probs],
            prompt_log_probs=[entry for output in outputs for entry in output.prompt_log_probs],
        )


class RequestState(enum.Enum):
    """Where a request is on its way through the engine."""

    WAITING = enum.auto()  # for a slot and pages
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """The engine's own record of a request. The scheduler alone moves it from state to state.

    Attributes:
      limit: new tokens at most, context included.
      seed: of the noise, drawn if the caller set none.
      generated: new tokens read back so far.
      pages: cache pages held.
      queued_at: on the clock of `time.perf_counter`.
      queued_seconds: it waited for a slot, until the first output takes them.
      prefilled: tokens of `sequence` whose processing has been dispatched.
      in_flight: rounds dispatched and not read back.
      matcher: the state of the request's grammar after `generated`.
      prompt_rows: prompt log-probabilities on their way from the device: (rows, row, tokens); emptied
        with the first output.
    """

    id: int
    prompt: list[int]
    sampling: SamplingParams
    limit: int
    seed: int
    stop_ids: tuple[int, ...]
    priority: int = 0
    queued_at: float = 0.0
    queued_seconds: float | None = None
    generated: list[int] = field(default_factory=list)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    in_flight: int = 0
    matcher: "GrammarMatcher | None" = None
    prompt_rows: "list[tuple[LogProbRows, int, list[int]]]" = field(default_factory=list)
    finish_reason: FinishReason | None = None
    statistics: RequestStatistics = field(default_factory=RequestStatistics)

    @property
    def state(self) -> RequestState:
        """Where the request is."""
        if self.finish_reason is not None:
            return RequestState.FINISHED
        if self.slot is None:
            return RequestState.WAITING
        return RequestState.PREFILLING if self.to_prefill > 0 else RequestState.DECODING

    @property
    def taken_slot(self) -> int:
        """The slot of a request that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer so far; its last token is the anchor."""
        return self.prompt + self.generated

    def turn(self) -> tuple[int, int]:
        """What requests are served in ascending order of."""
        return (-self.priority, self.id)

    @property
    def to_prefill(self) -> int:
        """Tokens before the anchor that still have to be processed."""
        return len(self.prompt) + len(self.generated) - 1 - self.prefilled

    @property
    def awaits_prompt_log_probs(self) -> bool:
        """Whether the prompt's log-probabilities were asked for and are not on their way."""
        return self.sampling.prompt_log_probs is not None and not self.generated

    def take_prompt_log_probs(self) -> list[TokenLogProb]:
        """The prompt's log-probabilities, once."""
        rows, self.prompt_rows = self.prompt_rows, []
        top = self.sampling.prompt_log_probs or 0
        return [entry for part, row, tokens in rows for entry in host_log_probs(part, row, tokens, top)]

    def reach(self, tokens_per_round: int, more_rounds: int = 0) -> int:
        """The most tokens of context that the dispatched rounds, and `more_rounds`, can commit."""
        rounds = self.in_flight + more_rounds
        done = len(self.prompt) + len(self.generated) - 1
        return min(done + rounds * tokens_per_round, len(self.prompt) + self.limit)

    @property
    def certain_to_finish(self) -> bool:
        """Whether the rounds in flight use up the limit, since each produces a token at least."""
        return len(self.generated) + self.in_flight >= self.limit
