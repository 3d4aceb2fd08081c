"""What a Kimi model says, taken apart as it comes: reasoning, answer and tool calls.

A marker (`<think>`, `<|tool_call_begin|>`, …) is one special token. Fed with ids, the parser knows a marker from text
that merely spells it, which a model does when it quotes; fed with text, it goes by the spelling and holds back whatever
may still become a marker. However the stream is split, the deltas add up to the same.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from jaxspec.model.text.messages import Message
from jaxspec.model.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
END_TURN = "<|im_end|>"
_SPELLINGS = {"<|tool_call_section_begin|>": SECTION, "<|tool_call_section_end|>": END_SECTION}  # Seen as well.
_TOOL_MARKERS = (SECTION, END_SECTION, CALL, ARGUMENTS, END_CALL, END_TURN, *_SPELLINGS)
_CALL_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a tool call.

    Attributes:
      index: of the call in this answer.
      id, name: in the call's first delta only.
      arguments: JSON text to append to what came before.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class OutputDelta:
    """What is new, each to be appended to what came before."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class _Part(Enum):
    """Where in an answer the stream is."""

    REASONING = auto()
    CONTENT = auto()
    BETWEEN_CALLS = auto()
    CALL_ID = auto()
    ARGUMENTS = auto()


@dataclass
class _Call:
    """The call that is being written."""

    heading: str = ""  # Its id as the model writes it.
    name: str | None = None  # None while it must be found by the arguments.
    begun: bool = False  # Whether any of the arguments came.
    arguments: str = ""  # All of them, while there is no name.
    spaces: str = ""  # White space that counts only if more arguments follow.


class KimiOutput:
    """Parses one answer: `push` text or `push_ids`, then `finish`.

    Args:
      reasoning: whether the answer begins inside reasoning, the prompt having opened it.
      tools: the request's tools, to name calls that the model leaves unnamed.
      calls_before: tool calls in the conversation so far; ids count on from there.
    """

    def __init__(self, reasoning: bool = False, tools: Sequence[Mapping[str, Any]] = (), calls_before: int = 0):
        self._part = _Part.REASONING if reasoning else _Part.CONTENT
        self._functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._calls_before, self._calls = calls_before, 0
        self._call = _Call()
        self._in_section = False
        self._lead: str | None = ""  # White space before anything else, where <think> may still come; then None.
        self._held = ""  # Text that may yet turn out to be a marker.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reasoning, self._content = "", ""  # Like `_deltas`: said since the last push.
        self._deltas: list[ToolCallDelta] = []

    @classmethod
    def after(
        cls,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "KimiOutput":
        """The parser of the answer to `prompt`, the ids of `messages` and `tools`."""
        specials = (tokenizer.special_text(index) for index in reversed(prompt))
        last = next((text for text in specials if text is not None), None)
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        return cls(last == THINK, tuple(tools or ()), calls)

    def push(self, text: str) -> OutputDelta:
        """What `text`, the next part of the answer with its markers spelt out, completes."""
        self._held += text
        while self._held:
            markers = self._awaited()
            found = _pattern(markers).search(self._held)
            end = found.start() if found else len(self._held) - _beginning_of_marker(self._held, markers)
            said, self._held = self._held[:end], self._held[end:]
            self._say(said)
            # Once there is text, <think> is no marker any more, so look again.
            if self._awaited() != markers:
                continue
            if found is None:
                break
            self._held = self._held[len(found.group()) :]
            self._mark(found.group())
        return self._take()

    def push_ids(self, tokenizer: Tokenizer, ids: Iterable[int]) -> OutputDelta:
        """What these ids complete; a special token is a marker, or nothing where it has no place."""
        for index in ids:
            marker = tokenizer.special_text(index)
            if marker is None:
                self._say(self._decoder.decode(tokenizer.token_bytes(index)))
            else:
                self._say(self._decoder.decode(b"", final=True))
                self._mark(marker)
        return self._take()

    def finish(self) -> OutputDelta:
        """What the end of the stream releases; a call of which only a part of the id came is dropped."""
        self._say(self._held + self._decoder.decode(b"", final=True))
        self._held = ""
        self._leave_lead()
        if self._part == _Part.ARGUMENTS and self._call.name is None:
            self._end_call()
        return self._take()

    def _awaited(self) -> tuple[str, ...]:
        """The markers that mean something here; elsewhere their spelling is text, in a call's arguments say."""
        if self._part == _Part.REASONING:
            return (THINK, END_THINK, *_TOOL_MARKERS) if self._lead is not None else (END_THINK, *_TOOL_MARKERS)
        return (THINK, *_TOOL_MARKERS) if self._lead is not None else _TOOL_MARKERS

    def _say(self, text: str) -> None:
        if self._lead is not None:
            self._lead += text
            if self._lead.strip():
                self._leave_lead()
        elif self._part == _Part.REASONING:
            self._reasoning += text
        elif self._part == _Part.CONTENT:
            self._content += text
        elif self._part == _Part.CALL_ID:
            self._call.heading += text
        elif self._part == _Part.ARGUMENTS:
            self._say_arguments(text)

    def _leave_lead(self) -> None:
        lead, self._lead = self._lead, None
        self._say(lead or "")

    def _mark(self, marker: str) -> None:
        marker = _SPELLINGS.get(marker, marker)
        if marker == THINK:
            self._lead = None
            if self._part == _Part.CONTENT:
                self._part = _Part.REASONING
            return
        self._leave_lead()
        if marker == END_THINK and self._part == _Part.REASONING:
            self._part = _Part.CONTENT
        elif marker == ARGUMENTS and self._part == _Part.CALL_ID:
            self._begin_arguments()
        elif marker in (SECTION, END_SECTION, CALL, END_CALL, END_TURN):
            if self._part in (_Part.CALL_ID, _Part.ARGUMENTS):
                self._end_call()
            if marker == CALL:
                self._part, self._call = _Part.CALL_ID, _Call()
            elif marker == SECTION:
                self._part, self._in_section = _Part.BETWEEN_CALLS, True
            elif marker == END_SECTION and self._part == _Part.BETWEEN_CALLS:
                self._part, self._in_section = _Part.CONTENT, False

    def _begin_arguments(self) -> None:
        self._part = _Part.ARGUMENTS
        found = _CALL_ID.fullmatch(self._call.heading.strip())
        name = found[1] if found else ""
        nameless = name in ("", "functions") or name.isdecimal()
        if name in self._functions or not nameless:
            self._announce(name)

    def _announce(self, name: str) -> None:
        """Gives the call its name, index and id."""
        self._call.name = name
        place = self._calls_before + self._calls
        self._deltas.append(ToolCallDelta(self._calls, f"functions.{name}:{place}", name, self._call.arguments))
        self._calls += 1

    def _say_arguments(self, text: str) -> None:
        call = self._call
        text = call.spaces + text if call.begun else text.lstrip()
        said = text.rstrip()
        call.spaces = text[len(said) :]
        call.begun = call.begun or bool(said)
        if call.name is None:
            call.arguments += said
        elif said:
            self._deltas.append(ToolCallDelta(self._calls - 1, None, None, said))

    def _end_call(self) -> None:
        if self._part == _Part.CALL_ID:
            self._begin_arguments()
        if self._call.heading.strip() or self._call.begun:  # Else there is nothing to tell a function by.
            if not self._call.begun:
                self._say_arguments("{}")
            if self._call.name is None:
                self._announce(_best_match(self._call.arguments, self._functions) or self._call.heading.strip())
        self._part = _Part.BETWEEN_CALLS if self._in_section else _Part.CONTENT

    def _take(self) -> OutputDelta:
        delta = OutputDelta(self._reasoning, self._content, tuple(_joined(self._deltas)))
        self._reasoning, self._content, self._deltas = "", "", []
        return delta


@functools.cache
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _beginning_of_marker(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    most = min(len(text), max(map(len, markers)) - 1)
    return next((n for n in range(most, 0, -1) if any(m.startswith(text[len(text) - n :]) for m in markers)), 0)


def _best_match(arguments: str, functions: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The function that these arguments fit best, by their names; None where there are no functions."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    keys = set(value) if isinstance(value, dict) else set()

    def fit(name: str) -> int:
        known, required = set(functions[name].get("properties", {})), set(functions[name].get("required", []))
        return len(keys & known) - len(keys - known) - len(required - keys)

    return max(functions, key=fit, default=None)


def _joined(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """The same with one delta a call."""
    joined: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = joined.get(delta.index)
        joined[delta.index] = replace(first, arguments=first.arguments + delta.arguments) if first else delta
    return list(joined.values())
