"""Answers are written once, in chunks, and split whole."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from jaxspec.training.answers import AnswerConfig, Examples, read_answers, split_examples, write_answers
from jaxspec.training.prompts import Prompt
from tests.support.training import echo_engine, examples_of


def test_answers_are_written_once(tmp_path):
    prompts = [Prompt("x" * n, f"source {n % 2}") for n in range(1, 11)]
    config = AnswerConfig(temperatures=(0.0, 1.0), max_prompt_tokens=22, chunk=3, seed=1)
    short = lambda prompt: [len(prompt.text)] * (13 + len(prompt.text))  # noqa: E731
    whole = tmp_path / "whole"
    write_answers(echo_engine(), short, prompts, config, whole, lambda *figures: None)
    examples = read_answers(whole)
    answered = [n for n in range(1, 10) if n % 5]  # the tenth prompt is too long; 5 gets an answer of a single token
    assert [int(examples[i][0]) for i in range(len(examples))] == answered
    np.testing.assert_array_equal(examples.prompt_lengths, [13 + n for n in answered])
    np.testing.assert_array_equal(examples.lengths, [13 + n + 1 + n % 5 for n in answered])
    np.testing.assert_array_equal(examples.temperatures, [(n - 1) % 2 for n in answered])
    assert examples.sources.tolist() == [f"source {n % 2}" for n in answered]

    parted = tmp_path / "parted"
    with pytest.raises(KeyboardInterrupt):
        write_answers(echo_engine(fail_at=4), short, prompts, config, parted, lambda *figures: None)
    assert [path.name for path in sorted(parted.glob("*.npz"))] == ["00000.npz"]
    first = (parted / "00000.npz").stat().st_mtime_ns
    engine = echo_engine()
    write_answers(engine, short, prompts, config, parted, lambda *figures: None)
    assert (parted / "00000.npz").stat().st_mtime_ns == first
    assert len(engine.sampling) == 6
    for field in ("tokens", "offsets", "prompt_lengths", "temperatures", "sources"):
        np.testing.assert_array_equal(getattr(read_answers(parted), field), getattr(examples, field))
    other = dataclasses.replace(config, max_answer_tokens=9)
    with pytest.raises(ValueError, match="max_answer_tokens: found 384, expected 9"):
        write_answers(echo_engine(), short, prompts, other, parted, lambda *figures: None)


def test_split_parts_examples_whole():
    examples = examples_of(40)
    training, held_out = split_examples(examples, 3, 0)
    assert (len(training), len(held_out)) == (37, 3)
    rows: Callable[[Examples], list] = lambda part: [tuple(part[i]) for i in range(len(part))]  # noqa: E731
    assert sorted(rows(training) + rows(held_out)) == sorted(rows(examples))
