"""Evaluations of tiny random models: every request in every mode, planted differences, conversations that end early."""

import itertools

import pytest

from jaxspec.evaluation import evaluation
from jaxspec.evaluation.evaluation import Evaluation, first_difference
from jaxspec.evaluation.modes import modes
from jaxspec.evaluation.prompts import Prompt
from jaxspec.evaluation.report import markdown, statistics_of, summarise
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import tiny_dflash, tiny_target
from tests.support.evaluations import DRAFTER, MODES, REQUESTS, TARGET, TEMPERATURES, select


def test_every_request_meets_every_mode(finished):
    _, records, _ = finished
    assert len(records) == REQUESTS * len(MODES) * len(TEMPERATURES)
    for mode, temperature in itertools.product(MODES, TEMPERATURES):
        some = select(records, mode=mode, temperature=temperature)
        assert len({(r["set"], r["id"], r["turn"]) for r in some}) == REQUESTS


def test_modes_agree_in_float32_and_records_add_up(finished, folder):
    _, records, _ = finished
    tokenizer = Tokenizer.from_checkpoint(folder)
    for record in records:
        twin = select(records, mode="plain", **{k: record[k] for k in ("set", "id", "turn", "temperature")})
        assert record["token_ids"] == twin[0]["token_ids"]
        assert record["prompt_tokens"] == twin[0]["prompt_tokens"]
        assert record["first_difference"] is None
        assert record["tokens"] == len(record["token_ids"]) <= 24
        assert record["text"] == tokenizer.decode(record["token_ids"])
        assert sum(record["accepted_lengths"]) == record["rounds"]
        assert record["tau"] == pytest.approx(record["tokens"] / record["rounds"])
    assert {r["tau"] for r in select(records, mode="plain")} == {1.0}
    hot = select(records, mode="plain", temperature=1.0)
    assert [r["token_ids"] for r in hot] != [r["token_ids"] for r in select(records, mode="plain", temperature=0.0)]


def test_second_turn_sees_the_plain_answer_to_the_first(finished, folder):
    _, records, _ = finished
    tokenizer = Tokenizer.from_checkpoint(folder)
    for record in select(records, id="short-1", turn=1):
        (first,) = select(records, id="short-1", turn=0, mode="plain", temperature=record["temperature"])
        talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": first["text"]}]
        ids = tokenizer.encode_chat([*talk, {"role": "user", "content": "And how?"}])
        assert record["prompt_tokens"] == len(ids)


def test_planted_differences_are_found(folder, monkeypatch):
    """Every pass samples with other seeds, as a faulty decoder might."""
    prompts = [Prompt("s", str(i), "c", (f"Number {i}",)) for i in range(3)]
    passing = itertools.count()
    monkeypatch.setattr(evaluation, "request_seed", lambda seed, key: next(passing))
    run = Evaluation(
        tiny_target(TARGET),
        tiny_dflash(DRAFTER),
        Tokenizer.from_checkpoint(folder),
        prompts,
        mesh=make_mesh(1),
        batch=2,
        max_tokens=24,
        seed=0,
    )
    ended = []
    plain, chain = run.run(modes([], 4, run.depth), [1.0], lambda mode, temperature: ended.append(mode.name))
    assert ended == ["plain"] * 3 + ["chain"] * 3
    for record, twin in zip(chain.records, plain.records, strict=True):
        ids, expected = record["token_ids"], twin["token_ids"]
        at = record["first_difference"]
        assert ids[:at] == expected[:at]
        assert ids[at : at + 1] != expected[at : at + 1]
    assert statistics_of(chain.records)["mismatches"] == 3
    assert statistics_of(plain.records)["mismatches"] == 0


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2)],
)
def test_first_difference(tokens, reference, expected):
    assert first_difference(tokens, reference) == expected


@pytest.fixture
def of_bytes(folder):
    """An evaluation whose answers, read back as text, are twelve tokens for each one generated."""

    class Echo(Tokenizer):
        def decode(self, ids, skip_special=True):
            return "twelve bytes" * len(ids)

    def run(*prompts, batch=1, max_tokens=8):
        models = tiny_target(TARGET), tiny_dflash(DRAFTER)
        return Evaluation(
            *models,
            Echo.from_checkpoint(folder),
            prompts,
            mesh=make_mesh(1),
            batch=batch,
            max_tokens=max_tokens,
            seed=0,
        )

    return run


def test_conversation_that_outgrows_the_context_ends_there(of_bytes):
    """Its first turns and the other conversations are asked in every mode; the rest is counted and named."""
    prompts = [Prompt("s", "long", "c", ("a" * 100, "b" * 100, "c" * 200, "d")), Prompt("s", "short", "c", ("e", "f"))]
    run = of_bytes(*prompts, batch=2, max_tokens=4)
    passes = list(run.run(modes([], 4, run.depth), [0.0], lambda mode, temperature: None))
    for done in passes:
        asked = [(record["id"], record["turn"]) for record in done.records]
        assert asked == [("long", 0), ("short", 0), ("long", 1), ("short", 1)]
    summary = summarise(passes, {})
    (left,) = summary["left_out"]
    second = next(r for r in passes[0].records if (r["id"], r["turn"]) == ("long", 1))
    found = second["prompt_tokens"] + 3 + 12 * second["tokens"] + 3 + 200
    reason = f"found {found} tokens, expected at most 399 (context limit)"
    assert left == {"temperature": 0.0, "set": "s", "id": "long", "turn": 2, "turns": 2, "reason": reason}
    page = markdown(summary)
    assert "Not asked: 2 later turn(s) of 1 conversation(s)" in page
    assert f"- long of s, from turn 3: {reason}" in page


def test_answers_that_grow_when_read_back_fit_the_cache(of_bytes, monkeypatch):
    """The second turn is estimated at one page and comes to two, and yet it fits the models."""
    monkeypatch.setattr(evaluation, "PAGE_SIZE", 128)
    run = of_bytes(Prompt("s", "a", "c", ("x", "y")), max_tokens=16)
    (plain,) = run.run(modes([], 4, run.depth)[:1], [1.0], lambda mode, temperature: None)
    assert plain.left_out == ()
    first, second = plain.records
    assert second["prompt_tokens"] == 4 + 3 + 12 * first["tokens"] + 4 > 128


def test_template_that_refuses_an_answer_ends_the_conversation(of_bytes, monkeypatch):
    run = of_bytes(Prompt("s", "a", "c", ("x", "y", "z")))
    encode = Tokenizer.encode_chat

    def refusing(self, messages):
        if "twelve" in "".join(message["content"] for message in messages):
            raise ValueError("chat template: refuses this")
        return encode(self, messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", refusing)
    (plain,) = run.run(modes([], 4, run.depth)[:1], [0.0], lambda mode, temperature: None)
    assert len(plain.records) == 1
    assert [(left["turn"], left["turns"], left["reason"]) for left in plain.left_out] == [
        (1, 2, "chat template: refuses this")
    ]
