"""Streams of text: however tokens and text are cut, what comes out is the same, and never part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.serve.requests.text_stream import StopMatcher, TextStream

TEXT = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """By the rule: the stop string complete first, the longest of those that end together; and the text before it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return stop, text[: end - len(stop)]
    return None


@given(st.lists(TEXT, max_size=8), STOPS, st.booleans())
def test_cuts_do_not_matter(pieces, stops, include):
    matcher = StopMatcher(stops, include)
    whole = "".join(pieces)
    expected = first_stop(whole, stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        # Nothing came out that a later stop string takes back, whatever follows.
        assert whole.startswith(out)
        if expected is not None:
            assert len(out) <= len(expected[1]) + include * len(expected[0])
    out += matcher.flush()
    if expected is None:
        assert (matcher.matched, out) == (None, whole)
    else:
        stop, before = expected
        assert (matcher.matched, out) == (stop, before + stop * include)


@given(TEXT, STOPS)
def test_no_more_is_held_back_than_must_be(text, stops):
    matcher = StopMatcher(stops)
    out = matcher.push(text)
    if matcher.matched is None:
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        # The earliest place where a stop string may still begin.
        assert not any(stop.startswith(text[start:]) for start in range(len(out)) for stop in stops)


class Bytes:
    """A detokenizer whose token ids are bytes."""

    def __init__(self):
        from codecs import getincrementaldecoder

        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids):
        return self._decoder.decode(bytes(ids))

    def flush(self):
        return self._decoder.decode(b"", final=True)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_whole_characters_token_by_token(text, stops):
    stream = TextStream(Bytes(), stops)
    expected = first_stop(text, stops)
    deltas = [stream.push(byte) for byte in text.encode()]
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text
    assert "".join(deltas) + stream.flush() == (text if expected is None else expected[1])
    assert stream.matched == (expected and expected[0])


def test_a_stop_string_counts_only_after_so_many_tokens():
    class Letters:
        def push(self, ids):
            return "".join(map(chr, ids))

        def flush(self):
            return ""

    for least, expected, matched in (
        (0, "x", "ab"),
        (2, "x", "ab"),
        (3, "xa", "ba"),
        (4, "xab", "ab"),
        (9, "xabababa", None),
    ):
        stream = TextStream(Letters(), ["ab", "ba"], min_tokens=least)
        text = "".join(stream.push(ord(letter)) for letter in "xabababa") + stream.flush()
        assert (text, stream.matched) == (expected, matched)


def test_an_unfinished_character_ends_as_a_replacement_that_may_stop():
    stream = TextStream(Bytes(), ["\ufffd"])
    assert stream.push("é".encode()[0]) == ""
    assert stream.flush() == ""
    assert stream.matched == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "matched", "before"),
    [
        ("xabcd", ["abcd", "c"], "c", "xab"),
        ("xab", ["b", "ab"], "ab", "x"),
        ("aab", ["ab"], "ab", "a"),
        ("abab", ["abb"], None, "abab"),
    ],
)
def test_which_stop_string_counts(text, stops, matched, before):
    matcher = StopMatcher(stops)
    out = "".join(map(matcher.push, text)) + matcher.flush()
    assert (matcher.matched, out) == (matched, before)
