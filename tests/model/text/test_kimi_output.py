"""Kimi's answers taken apart as they stream in."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxspec.model.text.kimi_output import KimiOutput
from jaxspec.model.text.tokenizer import Tokenizer
from tests.support.kimi_files import trained_ranks, write_kimi_tokenizer

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
OPEN = SECTION + "<|tool_call_begin|>"
MARKERS = [
    "<think>",
    "</think>",
    SECTION,
    END_SECTION,
    "<|tool_call_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_end|>",
]
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}, "top": {}}}}},
    {
        "type": "function",
        "function": {"name": "read-file.v2", "parameters": {"properties": {"path": {}}, "required": ["path"]}},
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(heading, arguments):
    return f"<|tool_call_begin|>{heading}{ARGUMENTS}{arguments}<|tool_call_end|>"


def collect(parser, deltas):
    reasoning, content, calls = "", "", []
    for delta in deltas:
        reasoning += delta.reasoning
        content += delta.content
        for part in delta.tool_calls:
            if part.index == len(calls):
                calls.append([part.id, part.name, part.arguments])
            else:
                assert (part.id, part.name) == (None, None)
                calls[part.index][2] += part.arguments
    return reasoning, content, [tuple(entry) for entry in calls]


def parse(parts, reasoning=False, tools=TOOLS, calls_before=0):
    parser = KimiOutput(reasoning, tools, calls_before)
    return collect(parser, [*(parser.push(part) for part in parts), parser.finish()])


CASES = [
    # Reasoning that the prompt opened, or the model, or nobody.
    ("because</think>so", True, ("because", "so", [])),
    ("<think>because</think>so", True, ("because", "so", [])),
    ("\n<think>because</think>so", False, ("because", "so", [])),
    ("a <think>b</think>", False, ("", "a <think>b</think>", [])),
    ("because", True, ("because", "", [])),
    (" \n ", False, ("", " \n ", [])),
    ("so<|im_end|>", False, ("", "so", [])),
    ("a < b <| c <|tool", False, ("", "a < b <| c <|tool", [])),
    # Calls, with reasoning left open, text around them, and the spelling of markers in their arguments.
    (
        "hm" + SECTION + call("functions.search:0", "{}") + END_SECTION + "<|im_end|>",
        True,
        ("hm", "", [("functions.search:4", "search", "{}")]),
    ),
    (
        "go" + SECTION + " " + call(" functions.search:7 ", ' {"query": "<think> </think> <|"} ') + "\n"
        + call("functions.read-file.v2:8", '{"path":"/"}') + END_SECTION + "done",
        False,
        (
            "",
            "godone",
            [
                ("functions.search:4", "search", '{"query": "<think> </think> <|"}'),
                ("functions.read-file.v2:5", "read-file.v2", '{"path":"/"}'),
            ],
        ),
    ),
    (
        "<|tool_call_section_begin|>" + call("search", '{"top":1}') + "<|tool_call_section_end|>",
        False,
        ("", "", [("functions.search:4", "search", '{"top":1}')]),
    ),
    (call("functions.now:0", "") + "x", False, ("", "x", [("functions.now:4", "now", "{}")])),
    # Ids that are a bare counter: the arguments tell the function.
    (
        SECTION + call("0", '{"path": 1}'),
        False,
        ("", "", [("functions.read-file.v2:4", "read-file.v2", '{"path": 1}')]),
    ),
    (SECTION + call(":1", '{"top": 1}'), False, ("", "", [("functions.search:4", "search", '{"top": 1}')])),
    (SECTION + call("functions.2", ""), False, ("", "", [("functions.search:4", "search", "{}")])),
    (OPEN + "3" + ARGUMENTS + '{"path"', False, ("", "", [("functions.search:4", "search", '{"path"')])),
    (SECTION + OPEN + call("", " ") + call("now", ""), False, ("", "", [("functions.now:4", "now", "{}")])),
    # Cut off, or not closed.
    (OPEN + "functions.sea", False, ("", "", [])),
    (OPEN + "search:0" + ARGUMENTS + '{"a": ', False, ("", "", [("functions.search:4", "search", '{"a":')])),
    (
        OPEN + "search:0" + ARGUMENTS + "{}" + call("now:1", "{}") + "<|im_end|>",
        False,
        ("", "", [("functions.search:4", "search", "{}"), ("functions.now:5", "now", "{}")]),
    ),
    # A name that no tool has, and markers without a place.
    (SECTION + call("functions.a b:0", "1"), False, ("", "", [("functions.a b:4", "a b", "1")])),
    (f"a{END_SECTION}b<|tool_call_end|>c{ARGUMENTS}d", False, ("", "abcd", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "expected"), CASES)
def test_answers(text, reasoning, expected):
    assert parse([text], reasoning, calls_before=4) == expected
    assert parse(list(text), reasoning, calls_before=4) == expected


def test_a_bare_counter_without_tools_is_its_own_name():
    assert parse([SECTION + call("0", "{}")], tools=[])[2] == [("functions.0:0", "0", "{}")]


ANSWERS = st.lists(
    st.sampled_from([*MARKERS, *(case[0] for case in CASES), "{}", "functions.search:0", " ", "<", "a<|", "0"]),
    max_size=8,
).map("".join) | st.text(max_size=20)


@given(st.data(), ANSWERS, st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_split_of_the_stream_gives_the_same_parse(data, text, reasoning):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parse([text], reasoning)
    assert parse(parts, reasoning) == whole
    for marker in MARKERS[2:]:
        assert marker not in whole[0] + whole[1]
        assert not any(marker in part for entry in whole[2] for part in entry)


@given(ANSWERS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_nothing_is_said_that_later_turns_out_to_be_a_marker(text, reasoning):
    """Whatever comes next, what was said so far is the beginning of what will have been said."""
    parser = KimiOutput(reasoning, TOOLS)
    deltas = []
    for letter in text:
        deltas.append(parser.push(letter))
    soon = collect(parser, deltas)
    for end in ("", *MARKERS):
        late = parse([text + end], reasoning)
        assert late[0].startswith(soon[0])
        assert late[1].startswith(soon[1])


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return Tokenizer.from_checkpoint(
        write_kimi_tokenizer(tmp_path_factory.mktemp("kimi") / "files", trained_ranks(500))
    )


@given(st.data(), ANSWERS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_ids_give_the_same_parse_as_their_text(kimi, data, text, reasoning):
    text = text.replace("<think>", "").replace("</think>", "")  # As tokens they always are markers.
    text = data.draw(st.sampled_from(["", "<think>a</think>", *(["a</think>"] if reasoning else [])])) + text
    text = text.replace("<|tool_call_section_begin|>", SECTION).replace("<|tool_call_section_end|>", END_SECTION)
    ids = kimi.encode(text)
    # Any other special token is control: as an id it leaves no text.
    assume(all(kimi.special_text(i) in (None, *MARKERS) for i in ids))
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    parser = KimiOutput(reasoning, TOOLS)
    deltas = [parser.push_ids(kimi, ids[a:b]) for a, b in zip([0, *places], [*places, len(ids)], strict=True)]
    assert collect(parser, [*deltas, parser.finish()]) == parse([text], reasoning)


def test_a_quoted_marker_is_text_where_ids_are_given(kimi):
    quoted = "Say </think> and " + SECTION + call("functions.search:0", "{}")
    prompt = kimi.encode_chat([{"role": "user", "content": quoted}])
    ids = [index for index in prompt if kimi.special_text(index) is None]
    parser = KimiOutput(True, TOOLS)
    reasoning, content, calls = collect(parser, [parser.push_ids(kimi, ids), parser.finish()])
    assert quoted in reasoning
    assert (content, calls) == ("", [])


def test_where_an_answer_begins_and_ids_go_on(kimi):
    calls = [{"id": "functions.now:0", "function": {"name": "now", "arguments": "{}"}}] * 2
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    for opened, expected in (("<think>", ("a", "", [])), ("<think></think>", ("", "a", [])), ("", ("", "a", []))):
        prompt = kimi.encode_chat(messages) + kimi.encode(opened)
        parser = KimiOutput.after(kimi, prompt, messages, TOOLS)
        assert collect(parser, [parser.push("a"), parser.finish()]) == expected
    parser = KimiOutput.after(kimi, prompt, messages, TOOLS)
    answer = collect(parser, [parser.push(call("search", "{}"))])
    assert answer[2] == [("functions.search:2", "search", "{}")]
