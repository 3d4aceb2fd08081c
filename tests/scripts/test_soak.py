"""The soak passes a server that is right and fails one that is not."""

import asyncio
import os
import string

import pytest

import scripts.soak
from jaxspec.model.text.tokenizer import Tokenizer
from scripts.soak import Question, Soak, _run
from tests.support.published import write_byte_tokenizer
from tests.support.scripted_engine import ScriptedEngine, serving


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, {"eos_token": "</s>"})
    return Tokenizer.from_checkpoint(folder)


def soaked(engine, questions):
    """Soaks a server over an engine with 200 requests."""
    soak = Soak()

    async def run():
        async with serving(engine) as (server, _, _):
            await _run(soak, server.port, os.getpid(), questions, clients=8, seconds=30, requests=200, seed=1)

    asyncio.run(run())
    return soak


def questions(tokenizer, *lengths):
    letters = tokenizer.encode(string.ascii_lowercase)
    return [
        Question([1, 2], {"max_tokens": length}, [letters[place % 26] for place in range(length)]) for length in lengths
    ]


def test_a_right_server_passes(tokenizer):
    soak = soaked(ScriptedEngine(tokenizer), questions(tokenizer, 1, 2, 9, 60))
    assert soak.faults == []
    assert set(soak.outcomes) == {"answered", "left", "refused"}
    assert sum(soak.outcomes.values()) == 200
    assert soak.outcomes["answered"] > 120


def test_a_wrong_answer_fails(tokenizer):
    right, wrong = questions(tokenizer, 9, 60)
    wrong.answer[30] += 1
    soak = soaked(ScriptedEngine(tokenizer), [right, wrong])
    assert len(soak.faults) > 20
    assert all("expected" in fault for fault in soak.faults)


def test_a_slot_that_is_not_given_back_fails(tokenizer, monkeypatch):
    monkeypatch.setattr(scripts.soak, "IDLE_SECONDS", 0.2)
    engine = ScriptedEngine(tokenizer)
    load = engine.load
    monkeypatch.setattr(ScriptedEngine, "load", property(lambda self: load.__class__(1, 0, 3, load.pages)))
    soak = soaked(engine, questions(tokenizer, 2))
    assert soak.faults == ["idle, but 1 slots, 0 queue places and 3 pages are taken"]
