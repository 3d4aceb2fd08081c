"""The settings of an engine and of a request."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

MAX_BUDGET = 1024
MAX_SLOTS = 256
MAX_STOP_IDS = 16
MAX_BIASES = 300
MAX_TOP_LOG_PROBS = 20
GRAMMAR_KINDS = ("json_schema", "regex", "lark")


def _check(settings: Any, field: str, low: float, high: float, kind: type = Integral) -> None:
    """Raises ValueError, naming field, value and limits, unless the field is of `kind` and in range (NaN never is)."""
    value = getattr(settings, field)
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        what = "" if fits else "an integer from " if kind is Integral else "a number from "
        raise ValueError(f"{type(settings).__name__}.{field}: found {value!r}, expected {what}{low} to {high}")


@dataclass(frozen=True)
class SpeculationConfig:
    """How a round drafts.

    Attributes:
      budget: N, tree nodes verified beside the anchor; 0 decodes plainly.
      top_k_cap: K, the drafter's best tokens considered at each depth. With K = 1 the tree is a chain.
      draft_length: L, tokens drafted in one pass; None takes all that the drafter's block gives, fewer is allowed.
      rounds_per_call: rounds run by one compiled call.
    """

    budget: int = 16
    top_k_cap: int = 16
    draft_length: int | None = None
    rounds_per_call: int = 1

    def __post_init__(self) -> None:
        _check(self, "budget", 0, MAX_BUDGET)
        _check(self, "top_k_cap", 1, MAX_BUDGET)
        _check(self, "rounds_per_call", 1, 64)
        if self.draft_length is not None:
            _check(self, "draft_length", 1, MAX_BUDGET)

    def length(self, block_depth: int) -> int:
        """L, tokens that a drafter drafts in one pass whose block gives `block_depth`."""
        return self.draft_length or block_depth


@dataclass(frozen=True)
class EngineConfig:
    """The size of an engine.

    Attributes:
      devices: size of the mesh.
      slots: requests decoded at once.
      batch_buckets: how many requests programs are compiled for, ascending; the smallest that fits runs. None takes
        1, 4, 16, … up to `slots`. Work that keeps all slots busy compiles less with fewer buckets.
      page_size: tokens a cache page holds.
      max_context: tokens (prompt and answer) a request may reach; None takes the target's own limit.
      cache_tokens: tokens the paged cache holds over all requests; None holds `slots` requests of `max_context`,
        or as many tokens as fit into memory if that is enough for one.
      prefill_chunk: the most prompt tokens of one request that one call processes.
      keep_prefixes: whether the cache pages of finished requests are kept for requests that begin alike, until their
        place is needed.
      expert_layout: "tensor" splits each of a target's experts over the devices, "expert" gives a device whole ones.
      shard_cache: "sequence" spreads the rows of each of the target's pages over the devices; None leaves the cache
        as the family has it.
      memory_fraction: share of each device's memory for weights and caches; the rest is for what programs need
        while they run.
    """

    devices: int = 1
    slots: int = 16
    batch_buckets: tuple[int, ...] | None = None
    page_size: int = 16
    max_context: int | None = None
    cache_tokens: int | None = None
    prefill_chunk: int = 512
    keep_prefixes: bool = True
    expert_layout: Literal["tensor", "expert"] = "tensor"
    shard_cache: Literal["sequence"] | None = None
    memory_fraction: float = 0.92

    def __post_init__(self) -> None:
        _check(self, "devices", 1, 1024)
        _check(self, "slots", 1, MAX_SLOTS)
        _check(self, "page_size", 1, 1024)
        _check(self, "prefill_chunk", 1, 16384)
        _check(self, "memory_fraction", 0.01, 1.0, Real)
        if self.batch_buckets is not None and (
            not self.batch_buckets
            or sorted(set(self.batch_buckets)) != list(self.batch_buckets)
            or not 1 <= self.batch_buckets[0] <= self.batch_buckets[-1] == self.slots
        ):
            raise ValueError(
                f"EngineConfig.batch_buckets: found {self.batch_buckets}, expected ascending sizes that end with the "
                f"{self.slots} slots"
            )
        if self.max_context is not None:
            _check(self, "max_context", 2, math.inf)
        if self.cache_tokens is not None:
            _check(self, "cache_tokens", 2, math.inf)
        for field, choices in (("expert_layout", ("tensor", "expert")), ("shard_cache", ("sequence", None))):
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"EngineConfig.{field}: found {value!r}, expected {' or '.join(map(repr, choices))}")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch buckets in use."""
        if self.batch_buckets is not None:
            return self.batch_buckets
        return (*(size for size in (1, 4, 16, 64) if size < self.slots), self.slots)


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like.

    Attributes:
      kind: "json_schema", "regex" or "lark" (llguidance's dialect of it).
      source: the schema as JSON text, the expression, or the grammar.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"Grammar.kind: found {self.kind!r}, expected one of {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"Grammar.source: found {self.source!r}, expected the text of a {self.kind}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes:
      temperature: 0 takes the most probable token; so does anything below 1e-5, where float32 would overflow.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens until their mass reaches this; 1 keeps all.
      min_p: keep tokens at least this share of the most probable one's probability; 0 keeps all.
      seed: of the noise; None draws one. Equal seeds give equal tokens, with and without speculation, on any mesh.
      choice: which of several answers to one prompt this is; part of the noise's key.
      repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that are in the
        prompt or the answer; 1 changes nothing.
      presence_penalty: is subtracted from the logits of tokens that are in the answer.
      frequency_penalty: is subtracted from the logits of a token for each time it is in the answer.
      logit_bias: (token id, number added to its logit); each id once.
      max_tokens: new tokens at most.
      min_tokens: new tokens before which no stop id is chosen.
      log_probs: the answer's tokens come with their log-probabilities under the target, and with this many of the most
        probable tokens beside each; None leaves them out.
      prompt_log_probs: likewise for the prompt's tokens, the first excepted.
      budget: tree nodes verified a round for this request, at most the engine's, which None takes; 0 decodes plainly.
      grammar: what the answer must look like; drafts are cut at the first token that it forbids.
      stop_token_ids: end the answer, beside the model's own end ids; the stopping token is part of the answer.
      ignore_eos: do not stop at the model's own end ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    budget: int | None = None
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(self, "temperature", 0.0, 100.0, Real)
        _check(self, "top_k", 0, 2**31 - 1)
        _check(self, "top_p", 1e-6, 1.0, Real)
        _check(self, "min_p", 0.0, 1.0, Real)
        _check(self, "choice", 0, 2**31 - 1)
        _check(self, "max_tokens", 1, 2**31 - 1)
        _check(self, "min_tokens", 0, self.max_tokens)
        _check(self, "repetition_penalty", 0.01, 100.0, Real)
        _check(self, "presence_penalty", -2.0, 2.0, Real)
        _check(self, "frequency_penalty", -2.0, 2.0, Real)
        for name in ("log_probs", "prompt_log_probs"):
            if getattr(self, name) is not None:
                _check(self, name, 0, MAX_TOP_LOG_PROBS)
        if self.budget is not None:
            _check(self, "budget", 0, MAX_BUDGET)
        self._check_bias()
        if self.grammar is not None and self.ignore_eos:
            raise ValueError(
                "SamplingParams.ignore_eos: found True, expected False beside a grammar, which ends with it"
            )
        if self.seed is not None:
            _check(self, "seed", 0, 2**32 - 1)
        if not isinstance(self.stop_token_ids, tuple) or not all(isinstance(i, Integral) for i in self.stop_token_ids):
            raise ValueError(
                f"SamplingParams.stop_token_ids: found {self.stop_token_ids!r}, expected a tuple of token ids"
            )

    def _check_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"SamplingParams.logit_bias: found {pairs!r}, expected a tuple of (token id, bias) pairs")
        if len(pairs) > MAX_BIASES:
            raise ValueError(f"SamplingParams.logit_bias: found {len(pairs)} tokens, expected at most {MAX_BIASES}")
        if len({token for token, _ in pairs}) < len(pairs):
            raise ValueError("SamplingParams.logit_bias: found a token id twice, expected each once")
        for token, bias in pairs:
            number = isinstance(bias, Real) and not isinstance(bias, bool)
            if not isinstance(token, Integral) or not number or not -100 <= bias <= 100:
                raise ValueError(
                    f"SamplingParams.logit_bias: found {(token, bias)!r}, expected a token id and a number -100 to 100"
                )

    @property
    def processes_logits(self) -> bool:
        """Whether logits change before a token is chosen."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.min_tokens)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < 1e-5
