"""Structured output: which tokens a grammar allows after each node of a tree.

llguidance keeps the grammar's state. A matcher walks the tree from the root, one node at a time, and steps back; the
device gets one mask a row, so a node that its parent's mask forbids is never accepted.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from model.tokenizer import Tokenizer


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
        if self.kind not in _COMPILERS:
            raise ValueError(f"Grammar.kind: found {self.kind!r}, expected one of {', '.join(_COMPILERS)}")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"Grammar.source: found {self.source!r}, expected the text of a {self.kind}")

    @cached_property
    def compiled(self) -> str:
        """llguidance's form of the grammar.

        Raises:
          ValueError: the source is not what its kind says.
        """
        try:
            compiled = _COMPILERS[self.kind](self.source)
        except ValueError as error:
            raise ValueError(f"grammar: {_one_line(error)}") from None
        if fault := llguidance.LLMatcher.validate_grammar(compiled):
            raise ValueError(f"grammar: {_one_line(fault)}")
        return compiled


_COMPILERS: dict[str, Any] = {
    "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "lark": llguidance.LLMatcher.grammar_from_lark,
}


class GrammarCompiler:
    """Makes matchers for one vocabulary.

    Args:
      tokenizer: of the target.
      vocab_size: of the target's logits; ids that the tokenizer does not know are never allowed.
      eos_token_ids: allowed where the grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        if not eos_token_ids:
            raise ValueError("grammar: the target has no end-of-answer id, expected one, which ends a finished answer")
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._words = -(-vocab_size // 32)

    def matcher(self, grammar: Grammar) -> "GrammarMatcher":
        """The state of a grammar before the answer's first token.

        Raises:
          ValueError: no answer can meet the grammar, or it is too large.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, grammar.compiled, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {_one_line(matcher.get_error())}")
        return GrammarMatcher(matcher, self._words)


class GrammarMatcher:
    """The state of one request's grammar after the tokens committed so far."""

    def __init__(self, matcher: Any, words: int):
        self._matcher = matcher
        self._words = words

    def advance(self, tokens: list[int]) -> None:
        """Moves past committed tokens."""
        self._matcher.try_consume_tokens(tokens)

    def allowed(self, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Tokens that may follow each row of a tree.

        Args:
          tokens, parents: int32 [rows], row 0 is the anchor, which is committed.
          valid: bool [rows].
        Returns:
          uint32 [rows, ceil(vocab / 32)], bit t % 32 of word t // 32 for token t. A row that the grammar forbids allows
          all: the mask of its parent already keeps it from being accepted.
        """
        masks = np.full((len(tokens), self._words), -1, np.int32)
        children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            if valid[row]:
                children[parents[row]].append(row)
        # Depth first: (row, whether its children are done).
        stack = [(0, False)]
        while stack:
            row, done = stack.pop()
            if done:
                self._matcher.rollback(1)
                continue
            if row and self._matcher.try_consume_tokens([int(tokens[row])]) != 1:
                continue
            if row:
                stack.append((row, True))
            fill_next_token_bitmask(self._matcher, masks, row)
            stack += [(child, False) for child in children[row]]
        return masks.view(np.uint32)


def _one_line(error: object) -> str:
    return str(error).splitlines()[0].strip()
