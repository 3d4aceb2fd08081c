"""Prompt files, good and bad, and the seeds of their requests."""

import pytest

from jaxspec.evaluation.prompts import Prompt, read_prompts, request_seed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", r"p\.jsonl line 2: found \[1\], expected an object"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"id": "b"}', "line 2: turns: found None"),
        ('{"id": "b", "turns": []}', "line 2: turns: found"),
        ('{"id": "b", "turns": [1]}', "line 2: turns: found"),
        ('{"id": "a", "turns": ["x"]}', "line 2: id: found 'a' twice"),
        ('{"id": "b", "turns": ["\\udcff"]}', r"p\.jsonl line 2: found '\\udcff', half a surrogate pair"),
        ('{"id": "\\ud800", "turns": ["x"]}', r"line 2: found '\\ud800', half a surrogate pair"),
    ],
)
def test_bad_prompt_files(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"id": "a", "turns": ["x"]}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        read_prompts(path)
    assert read_prompts(path, 1) == [Prompt("p", "a", "p", ("x",))]


def test_prompt_file_that_is_not_utf8(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"turns": ["x"]}\n{"turns": ["\xff"]}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl line 2: not UTF-8: found byte 0xff"):
        read_prompts(tmp_path / "p.jsonl")


def test_empty_prompt_file(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="found no prompts"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_requests_seed_is_its_own():
    keys = [("s", "a", 0), ("s", "a", 1), ("s", "b", 0), ("t", "a", 0)]
    seeds = {request_seed(seed, key) for seed in (0, 1) for key in keys}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)
