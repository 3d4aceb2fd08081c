"""Prompts that are read, written and invented."""

import json

import pytest

from jaxspec.training.prompts import (
    Prompt,
    file_prompts,
    invent_prompts,
    read_written_prompts,
    reads_like_a_request,
    write_prompts,
)
from tests.support.training import echo_engine


def encode(prompt: Prompt) -> list[int]:
    return list(b"<user>" + prompt.text.encode() + b"</user>")


def test_invented_prompts_read_like_requests_and_differ():
    decode = lambda tokens: bytes(tokens).decode()  # noqa: E731
    found = invent_prompts(echo_engine(), encode, decode, 5, 0, lambda *figures: None)
    assert {prompt.text for prompt in found} == {"What is the capital of Peru?", "Tell me a long story about bees."}
    assert not reads_like_a_request("")
    assert not reads_like_a_request("again and again and again and again and again.")


def test_prompts_from_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "two"]}\n\n{"turns": ["three"]}\n')
    (tmp_path / "b.txt").write_text("plain line\n")
    assert [p.text for p in file_prompts(tmp_path / "a.jsonl")] == ["one", "three"]
    assert file_prompts(tmp_path / "b.txt") == [Prompt("plain line", "b")]
    # Unicode's own line ends end no line: neither in a file nor in what is written of it.
    odd = [f"one{end}two" for end in "\u2028\u2029\u0085\x0b\x0c\x1c"]
    (tmp_path / "d.txt").write_text("\n".join(odd), encoding="utf-8")
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"turns": [t]}, ensure_ascii=False) for t in odd), "utf-8")
    for name in ("d.txt", "d.jsonl"):
        found = file_prompts(tmp_path / name)
        assert found == [Prompt(text, "d") for text in odd]
        write_prompts(tmp_path / "written.jsonl", found)
        assert read_written_prompts(tmp_path / "written.jsonl") == found
    (tmp_path / "c.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl line 1"):
        file_prompts(tmp_path / "c.jsonl")
