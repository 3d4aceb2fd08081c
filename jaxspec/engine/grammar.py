"""Structured output: which tokens a grammar allows after each node of a tree.

llguidance keeps the grammar's state. A matcher walks the tree from the root, one node at a time, and steps back; the
device gets one mask a row, so a node that its parent's mask forbids is never accepted.
"""

import threading
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from jaxspec.config import Grammar
from jaxspec.engine.grammar_sandbox import COMPILERS, on_deep_stack, try_out
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.arithmetic import cdiv

KEPT = 64  # Compiled grammars that are kept for requests to come.


def llguidance_form(grammar: Grammar) -> str:
    """A grammar as llguidance reads it.

    Raises:
      ValueError: the source is not what its kind says.
    """
    try:
        form = COMPILERS[grammar.kind](grammar.source)
    except ValueError as error:
        raise ValueError(f"grammar: {_one_line(error)}") from None
    if fault := llguidance.LLMatcher.validate_grammar(form):
        raise ValueError(f"grammar: {_one_line(fault)}")
    return form


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
        self._words, self._ends = cdiv(vocab_size, 32), eos_token_ids
        self._lock, self._prepared = threading.Lock(), dict[Grammar, Any]()

    def prepare(self, grammar: Grammar, tried: bool = False) -> Any:
        """Compiles a grammar, unless that was done and is still kept; any thread may call this.

        Args:
          tried: whether a process of its own tries the grammar out first, as one from a stranger needs.
        Returns:
          llguidance's matcher before the first token, to be copied.

        Raises:
          ValueError: no answer can meet the grammar, or it is too large.
          ValueError, TimeoutError: as `try_out`.
        """
        with self._lock:
            prepared = self._prepared.pop(grammar, None)
            if prepared is not None:
                self._prepared[grammar] = prepared  # It was used, so it is the last to go.
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
        """Gives the state of a grammar before the answer's first token; raises as `prepare`."""
        return self._started(self.prepare(grammar).deep_copy())

    def _compile(self, grammar: Grammar) -> Any:
        compiled = llguidance.LLMatcher(self._tokenizer, llguidance_form(grammar), log_level=0)
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
