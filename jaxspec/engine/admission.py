"""What a request may ask of an engine."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import MAX_STOP_IDS, SamplingParams


@dataclass(frozen=True)
class Admission:
    """The limits of one engine.

    Attributes:
      vocab: of the target.
      max_context: tokens of prompt and answer.
      cache_tokens: what the whole cache holds.
      eos_token_ids: end answers that do not ignore them.
    """

    vocab: int
    max_context: int
    cache_tokens: int
    eos_token_ids: tuple[int, ...]

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], tuple[int, ...], int]:
        """The prompt's ids, all ids that stop the answer, and how many new tokens there may be.

        Raises:
          ValueError: naming field, value and limit.
        """
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"prompt: {error}, expected token ids 0 to {self.vocab - 1}") from None
        if not ids:
            raise ValueError("prompt: found 0 tokens, expected at least 1")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"prompt: found {len(ids)} tokens, expected at most {self.max_context - 1} (context limit)"
            )
        ends = () if sampling.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        for field, tokens in (
            ("prompt", ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", stop_ids),
        ):
            if wrong := [token for token in tokens if not 0 <= token < self.vocab]:
                raise ValueError(f"{field}: found token id {wrong[0]}, expected 0 to {self.vocab - 1}")
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids: found {len(stop_ids)} with the model's own, expected at most {MAX_STOP_IDS}"
            )
        limit = min(sampling.max_tokens, self.max_context - len(ids))
        if len(ids) + limit > self.cache_tokens:
            raise ValueError(
                f"prompt: needs a cache of {len(ids) + limit} tokens with its answer, expected at most "
                f"{self.cache_tokens}"
            )
        return ids, stop_ids, limit
