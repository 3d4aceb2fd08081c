"""Structured output: which tokens a grammar allows after each node of a tree.

llguidance keeps the grammar's state. A matcher walks the tree from the root, one node at a time, and steps back; the
device gets one mask a row, so a node that its parent's mask forbids is never accepted.
"""

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from jaxspec.engine.grammar_sandbox import COMPILERS, on_deep_stack, try_out
from jaxspec.model.text.tokenizer import Tokenizer

KEPT = 64  # compiled grammars, for requests to come


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
        if self.kind not in COMPILERS:
            raise ValueError(f"Grammar.kind: found {self.kind!r}, expected one of {', '.join(COMPILERS)}")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"Grammar.source: found {self.source!r}, expected the text of a {self.kind}")

    @cached_property
    def compiled(self) -> str:
        """llguidance's form of the grammar.

        Raises:
          ValueError: the source is not what its kind says.
        """
        try:
            compiled = COMPILERS[self.kind](self.source)
        except ValueError as error:
            raise ValueError(f"grammar: {_one_line(error)}") from None
        if fault := llguidance.LLMatcher.validate_grammar(compiled):
            raise ValueError(f"grammar: {_one_line(fault)}")
        return compiled


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
        self._words, self._ends = -(-vocab_size // 32), eos_token_ids
        self._lock, self._prepared = threading.Lock(), dict[Grammar, Any]()

    def prepare(self, grammar: Grammar, tried: bool = False) -> Any:
        """Compiles a grammar, unless it still is; from any thread.

        Args:
          tried: whether to try it out first, since it comes from who knows whom.
        Returns:
          llguidance's matcher before the first token, to be copied.

        Raises:
          ValueError: no answer can meet the grammar, or it is too large.
          ValueError, TimeoutError: as `try_out`.
        """
        with self._lock:
            prepared = self._prepared.pop(grammar, None)
            if prepared is not None:
                self._prepared[grammar] = prepared  # the last to go
        if prepared is None:
            if tried:
                try_out(grammar.kind, grammar.source)
            prepared = on_deep_stack(lambda: self._compile(grammar))
            with self._lock:
                self._prepared[grammar] = prepared
                if len(self._prepared) > KEPT:
                    del self._prepared[next(iter(self._prepared))]
        return prepared

    def matcher(self, grammar: Grammar) -> "GrammarMatcher":
        """The state of a grammar before the answer's first token; raises as `prepare`."""
        return self._started(self.prepare(grammar).deep_copy())

    def _compile(self, grammar: Grammar) -> Any:
        compiled = llguidance.LLMatcher(self._tokenizer, grammar.compiled, log_level=0)
        matcher = self._started(compiled)
        if not compiled.is_error():
            root = np.zeros(1, np.int32)
            mask = matcher.allowed(root, root, np.ones(1, bool))[0]
            for end in self._ends:
                mask[end // 32] &= ~np.uint32(1 << end % 32)
            if not mask.any() and not compiled.is_accepting():
                raise ValueError("grammar: found one that no answer can meet, expected one with an answer")
        if compiled.is_error():
            raise ValueError(f"grammar: {_one_line(compiled.get_error())}")
        return compiled

    def _started(self, matcher: Any) -> "GrammarMatcher":
        return GrammarMatcher(matcher, self._words, self._ends)


class GrammarMatcher:
    """The state of one request's grammar after the tokens committed so far.

    Attributes:
      failed: whether the answer broke the grammar, since that allowed no token where one was due.
    """

    def __init__(self, matcher: Any, words: int, ends: tuple[int, ...]):
        self._matcher, self._words, self._ends = matcher, words, ends
        self.failed = False

    def advance(self, tokens: list[int]) -> None:
        """Moves past committed tokens; an end may come last."""
        rest = tokens[self._matcher.try_consume_tokens(tokens) :]
        # A grammar that is complete takes no more, not even the end.
        self.failed |= bool(rest) and not (rest[0] in self._ends and self._matcher.is_accepting())

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
