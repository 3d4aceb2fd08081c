"""Structured output: every answer meets its grammar, and trees change no token of it."""

import functools
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config import EngineConfig, Grammar, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.grammar import GrammarCompiler
from jaxspec.engine.request import Completion
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import GROUPED, Plan, oracle, oracle_drafting, tiny_target
from tests.support.published import write_byte_tokenizer

EOS, VOCAB = 257, 264  # six ids beyond the tokenizer's
MODEL = replace(GROUPED, vocab_size=VOCAB)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, 333]}},
        "required": ["name", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # or a random model fills the answer with it
    }
)
LIMIT = 60
FREE = SamplingParams(temperature=1.0, max_tokens=LIMIT)
REQUESTS = [
    replace(FREE, seed=1, temperature=0.0, grammar=Grammar("regex", r"(ab|c)[0-9]{3,5}x*y")),
    replace(FREE, seed=2, grammar=Grammar("regex", r"(ab|c)[0-9]{3,5}x*y"), log_probs=0),
    replace(FREE, seed=3, grammar=Grammar("json_schema", SCHEMA)),
    replace(FREE, seed=4, grammar=Grammar("lark", 'start: ("yes" | "no") "!"*'), presence_penalty=0.5),
    replace(FREE, seed=5, ignore_eos=True),
    replace(FREE, seed=6, grammar=Grammar("regex", "[a-z]+"), max_tokens=5),
]
PROMPTS = [np.random.default_rng(i).integers(0, 256, 3 + 5 * i).tolist() for i in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte") / "tokenizer"
    folder.mkdir()
    write_byte_tokenizer(folder, {"eos_token": "</s>"})
    return Tokenizer.from_checkpoint(folder.parent)


def engine(tokenizer: Tokenizer | None, budget: int, devices: int = 1, drafter: Any = None) -> Engine:
    return Engine(
        tiny_target(MODEL, devices),
        drafter,
        mesh=make_mesh(devices),
        speculation=SpeculationConfig(budget=budget, top_k_cap=3, rounds_per_call=2),
        config=EngineConfig(slots=4, batch_buckets=(4,), page_size=4, max_context=96, prefill_chunk=32),
        make_drafting=oracle_drafting,
        tokenizer=tokenizer,
        eos_token_ids=(EOS,),
    )


@functools.cache
def plain(tokenizer: Tokenizer) -> list[Completion]:
    return engine(tokenizer, 0).generate(PROMPTS, REQUESTS)


def test_answers_meet_their_grammars(tokenizer: Tokenizer) -> None:
    answers = plain(tokenizer)
    texts = [tokenizer.decode(done.tokens) for done in answers]
    for place in (0, 1):
        assert re.fullmatch(r"(ab|c)[0-9]{3,5}x*y", texts[place])
    assert {*json.loads(texts[2])} == {"name", "size"}
    assert json.loads(texts[2])["size"] in (1, 22, 333)
    assert re.fullmatch("(yes|no)!*", texts[3])
    assert re.fullmatch("[a-z]{5}", texts[5])
    assert [done.finish_reason for done in answers] == ["stop"] * 4 + ["length"] * 2
    assert all(done.tokens[-1] == EOS for done in answers[:4])
    assert len(answers[1].log_probs) == len(answers[1].tokens)


@pytest.mark.parametrize("devices", [1, 8])
def test_trees_change_no_token(tokenizer: Tokenizer, devices: int) -> None:
    plans = [
        Plan(params.seed or 0, prompt, done.tokens, [(7, 0)] * LIMIT if index % 2 else [])
        for index, (prompt, params, done) in enumerate(zip(PROMPTS, REQUESTS, plain(tokenizer), strict=True))
    ]
    answers = engine(tokenizer, 8, devices, oracle(plans, 8, 7, devices)).generate(PROMPTS, REQUESTS)
    assert [done.tokens for done in answers] == [done.tokens for done in plain(tokenizer)]
    accepted = np.zeros(8, int)
    for done in answers:
        accepted[: len(done.statistics.accepted_lengths)] += done.statistics.accepted_lengths
    assert (accepted[[0, 1, 2, 7]] > 0).all()


def test_masks_follow_the_tree(tokenizer: Tokenizer) -> None:
    """Against the regular expression, read byte by byte: a(b|c)d."""
    matcher = GrammarCompiler(tokenizer, VOCAB, (EOS,)).matcher(Grammar("regex", "a(b|c)d"))
    matcher.advance(tokenizer.encode("a"))
    a, b, c, d, x = (tokenizer.encode(letter)[0] for letter in "abcdx")
    # a → b → d → end, a → c → x (forbidden) → d, a → x (forbidden), padding
    tokens = np.array([a, b, c, x, d, x, EOS, d, 0], np.int32)
    parents = np.array([0, 0, 0, 0, 1, 2, 4, 5, 0], np.int32)
    valid = np.array([True] * 8 + [False])
    expected = {0: {b, c}, 1: {d}, 2: {d}, 4: {EOS}}
    for _ in range(2):  # and the matcher is where it was
        masks = matcher.allowed(tokens, parents, valid)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
        for row, allowed in expected.items():
            assert set(np.flatnonzero(bits[row])) == allowed
        for row in (3, 5, 7, 8):
            assert bits[row].all()


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("yaml", "a: b", "kind: found 'yaml', expected one of json_schema, regex, lark"),
        ("regex", "", "source: found ''"),
        ("regex", "[a-z", "grammar: .*invalid regex"),
        ("json_schema", '{"type": 3}', "grammar: type must be a string or array of strings"),
        ("json_schema", '{"type":', "grammar: "),
        ("json_schema", '{"enum": []}', "grammar: Unsatisfiable schema"),
        ("json_schema", '{"not": {}}', "grammar: Unimplemented keys"),
        ("lark", "start: missing", "grammar: "),
        ("lark", "start: start", "grammar: found one that no answer can meet"),
        ("regex", r"[^\s\S]", "grammar: found one that no answer can meet"),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(tokenizer: Tokenizer, kind: str, source: str, message: str) -> None:
    made = engine(tokenizer, 0)
    with pytest.raises(ValueError, match=message) as error:
        made.add([1], SamplingParams(grammar=Grammar(kind, source)))
    assert "\n" not in str(error.value)
    assert not made.has_work


def test_deeply_nested_grammars_are_compiled(tokenizer: Tokenizer) -> None:
    """Each of these overflows the stack of an ordinary thread."""
    rules = "".join(f"a{place}: a{place + 1}\n" for place in range(4999))
    lark = Grammar("lark", f'start: a0\n{rules}a4999: "x"')
    nested: dict[str, Any] = {"s0": {"type": "string"}}
    nested |= {f"s{place}": {"type": "array", "items": {"$ref": f"#/$defs/s{place - 1}"}} for place in range(1, 3000)}
    schema = Grammar("json_schema", json.dumps({"$defs": nested, "$ref": "#/$defs/s2999"}))
    compiler = GrammarCompiler(tokenizer, VOCAB, (EOS,))
    for grammar, first in ((lark, "x"), (schema, "[")):
        matcher = compiler.matcher(grammar)
        matcher.advance(tokenizer.encode(first))
        assert not matcher.failed


def test_a_grammar_is_tried_out_first(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, (EOS,))
    compiler.prepare(Grammar("regex", "a"), tried=True)
    with pytest.raises(ValueError, match="grammar: .*invalid regex"):
        compiler.prepare(Grammar("regex", "("), tried=True)
    monkeypatch.setattr("jaxspec.engine.grammar_sandbox.SECONDS", 1)
    began = time.monotonic()
    with pytest.raises(ValueError, match="grammar: found one that takes more than 1 s to compile"):
        compiler.prepare(Grammar("regex", "a?" * 30_000), tried=True)
    assert time.monotonic() - began < 5
    monkeypatch.setattr("jaxspec.engine.grammar_sandbox.sys.executable", "/bin/false")
    with pytest.raises(ValueError, match=r"grammar: found one that can't be compiled \(exit 1\)"):
        compiler.prepare(Grammar("regex", "b"), tried=True)
    monkeypatch.setattr("jaxspec.engine.grammar_sandbox.SECONDS", 0.01)
    monkeypatch.setattr("jaxspec.engine.grammar_sandbox._free", threading.Semaphore(0))
    with pytest.raises(TimeoutError, match="grammar: others take long to compile"):
        compiler.prepare(Grammar("regex", "b"), tried=True)
    compiler.prepare(Grammar("regex", "a"), tried=True)  # as it still is compiled


def test_compiled_grammars_are_kept_and_matchers_are_apart(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, (EOS,))
    first = compiler.matcher(Grammar("regex", "ab"))
    first.advance(tokenizer.encode("ab"))
    second = compiler.matcher(Grammar("regex", "ab"))
    second.advance([*tokenizer.encode("ab"), EOS])
    assert [first.failed, second.failed] == [False, False]
    first.advance(tokenizer.encode("c"))
    assert first.failed
    monkeypatch.setattr("jaxspec.engine.grammar.KEPT", 2)
    for source in "abc":
        compiler.prepare(Grammar("regex", source))
    assert [grammar.source for grammar in compiler._prepared] == ["b", "c"]


def test_an_answer_that_can_neither_go_on_nor_end_says_so(tokenizer: Tokenizer) -> None:
    stuck = SamplingParams(temperature=0, min_tokens=5, max_tokens=20, grammar=Grammar("regex", "yes"))
    plan = Plan(0, [1, 2], tokenizer.encode("yes"), [(7, 0)] * LIMIT)
    made = engine(tokenizer, 8, 1, oracle([plan], 8, 7, 1))
    told: list[str] = []
    made.runner.programs.report = told.append
    [answer] = made.generate([[1, 2]], stuck)
    assert answer.finish_reason == "grammar"
    assert any(line.startswith("compiled draft of decode 4 slot(s), ") for line in told)
    assert tokenizer.decode(answer.tokens).startswith("yes")
    assert not made.has_work
    [answer] = made.generate([[1, 2]], replace(stuck, min_tokens=3))
    assert answer.finish_reason == "stop"


def test_an_engine_without_a_tokenizer_and_endless_answers_are_refused() -> None:
    grammar = Grammar("regex", "a")
    with pytest.raises(ValueError, match="grammar: the engine has no tokenizer"):
        engine(None, 0).add([1], SamplingParams(grammar=grammar))
    with pytest.raises(ValueError, match="ignore_eos: found True, expected False"):
        SamplingParams(grammar=grammar, ignore_eos=True)
