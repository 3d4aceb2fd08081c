"""Evaluations of tiny random models: their numbers recounted, their faults planted, their output cut short."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from jaxspec.evaluation import evaluation
from jaxspec.evaluation.evaluation import Evaluation, first_difference
from jaxspec.evaluation.modes import modes
from jaxspec.evaluation.prompts import Prompt, read_prompts, request_seed
from jaxspec.evaluation.report import RunFolder, markdown, statistics_of, summarise
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh
from scripts.evaluate import app
from tests.support.builders import DFLASH, GROUPED, tiny_dflash, tiny_target
from tests.support.published import write_byte_tokenizer

SIZES = {"vocab_size": 260, "max_position_embeddings": 400}
TARGET = dataclasses.replace(GROUPED, **SIZES, eos_token_ids=(257,))
DRAFTER = dataclasses.replace(DFLASH, **SIZES, block_size=4, windows=(0, 0))
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}{% endfor %}"
FILES = {
    "short": [["Hi"], ["Why?", "And how?"], ["1 + 1"]],
    "long": [["Tell me everything about trees, please."], ["x" * 60]],
}
REQUESTS, MODES, TEMPERATURES = 6, ("plain", "chain", "ddtree-6"), (0.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target's folder, as far as its tokenizer is concerned."""
    path = tmp_path_factory.mktemp("target")
    write_byte_tokenizer(path, {"eos_token": "</s>", "chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    paths = []
    for name, turns in FILES.items():
        paths.append(root / f"{name}.jsonl")
        lines = [json.dumps({"id": f"{name}-{i}", "category": "c", "turns": t}) for i, t in enumerate(turns)]
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


@pytest.fixture(scope="module")
def evaluate(folder, prompts):
    """Runs the command; `options` come after the defaults."""

    def run(output, *options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxspec.model.checkpoint.loading.load_target", lambda path, mesh, dtype: tiny_target(TARGET))
            patch.setattr(
                "jaxspec.model.checkpoint.loading.load_drafter", lambda path, mesh, config, dtype: tiny_dflash(DRAFTER)
            )
            arguments = ["--target", folder, "--drafter", folder, "--output", output, "--batch", 2]
            arguments += ["--max-tokens", 24, "--budgets", "0,6", "--top-k-cap", 4, *options, "--prompts", *prompts]
            return CliRunner().invoke(app, list(map(str, arguments)))

    return run


@pytest.fixture(scope="module")
def finished(evaluate, tmp_path_factory):
    """A finished evaluation: its folder, records and summary."""
    output = tmp_path_factory.mktemp("runs") / "run"
    result = evaluate(output)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    return output, records, json.loads((output / "summary.json").read_text())


def select(records, **wanted):
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


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


def test_summary_equals_a_recount(finished):
    _, records, summary = finished
    assert [(e["mode"], e["temperature"]) for e in summary["passes"]] == [(m, t) for t in TEMPERATURES for m in MODES]
    for entry in summary["passes"]:
        mine = select(records, mode=entry["mode"], temperature=entry["temperature"])
        groups = [(entry, mine)]
        groups += [(part, select(mine, set=name)) for name, part in entry["sets"].items()]
        assert set(entry["sets"]) == set(FILES)
        for found, group in groups:
            tokens, rounds = (np.array([r[name] for r in group]) for name in ("tokens", "rounds"))
            assert (found["requests"], found["tokens"], found["rounds"]) == (len(group), tokens.sum(), rounds.sum())
            assert found["tau_mean"] == pytest.approx((tokens / rounds).mean())
            assert found["tau_pooled"] == pytest.approx(tokens.sum() / rounds.sum())
            lengths = np.concatenate([np.repeat(np.arange(len(h)), h) for h in (r["accepted_lengths"] for r in group)])
            depth = 0 if entry["mode"] == "plain" else 3
            shares = [float((lengths >= d).mean()) for d in range(1, depth + 1)]
            assert found["acceptance_by_depth"] == pytest.approx(shares)
            assert (found["mismatches"], found["first_difference"]) == (0, None)
        base = next(e for e in summary["passes"] if e["mode"] == "plain" and e["temperature"] == entry["temperature"])
        assert entry["tokens_per_second"] > 0
        assert entry["speedup"] == pytest.approx(entry["tokens_per_second"] / base["tokens_per_second"])


def test_page_shows_the_figures_and_names_the_chains_drafts(finished):
    output, _, summary = finished
    page = (output / "summary.md").read_text()
    cold, hot = page.split("## Temperature 1")
    assert "chain (greedy drafts)" in hot
    assert "greedy drafts" not in cold
    for entry in summary["passes"]:
        assert f"| {entry['tau_mean']:.2f} | {entry['tau_pooled']:.2f} | 0 of {REQUESTS} |" in page


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


def test_statistics_of_records_that_accept():
    def record(rounds, tokens, lengths, first_difference):
        tau = tokens / rounds
        return {"rounds": rounds, "tokens": tokens, "drafted": 0, "tau": tau} | {
            "accepted_lengths": lengths,
            "first_difference": first_difference,
        }

    found = statistics_of([record(4, 10, [1, 1, 1, 1], 7), record(2, 2, [2], None), record(2, 6, [0, 0, 2], 3)])
    assert (found["requests"], found["tokens"], found["rounds"]) == (3, 18, 8)
    assert found["tau_mean"] == pytest.approx((2.5 + 1 + 3) / 3)
    assert found["tau_pooled"] == 18 / 8
    assert found["acceptance_by_depth"] == [5 / 8, 4 / 8, 1 / 8]
    assert (found["mismatches"], found["first_difference"]) == (2, 3)


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2)],
)
def test_first_difference(tokens, reference, expected):
    assert first_difference(tokens, reference) == expected


def test_a_requests_seed_is_its_own():
    keys = [("s", "a", 0), ("s", "a", 1), ("s", "b", 0), ("t", "a", 0)]
    seeds = {request_seed(seed, key) for seed in (0, 1) for key in keys}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_output_cut_short_does_not_look_finished(evaluate, tmp_path, monkeypatch):
    output = tmp_path / "run"

    def killed(self, summary):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", killed)
    assert evaluate(output, "--temperatures", 0, "--limit", 1).exit_code != 0
    assert not output.exists()
    assert [path.name for path in (tmp_path / "run.partial").iterdir()] == ["results.jsonl"]
    monkeypatch.undo()
    refused = evaluate(output, "--temperatures", 0, "--limit", 1)
    assert (refused.exit_code, refused.stderr.count("left by an unfinished evaluation")) == (2, 1)
    assert not output.exists()


def test_existing_output_is_kept_unless_told(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="mine: .*exists"):
            RunFolder(tmp_path / "mine", overwrite=overwrite)
    summary = {"about": {}, "passes": [], "left_out": []}
    first = RunFolder(tmp_path / "run", overwrite=False)
    first.add([{"id": "1"}])
    first.finish(summary)
    with pytest.raises(ValueError, match="run: already exists"):
        RunFolder(tmp_path / "run", overwrite=False)
    second = RunFolder(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "results.jsonl").read_text() == '{"id": "1"}\n'
    second.add([{"id": "2"}])
    second.finish(summary)
    assert (tmp_path / "run" / "results.jsonl").read_text() == '{"id": "2"}\n'
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["mine", "run"]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budgets", "8,x"], "--budgets: found 'x'"),
        (["--budgets", "2000"], "SpeculationConfig.budget: found 2000"),
        (["--budgets", "6,4,6"], "--budgets: found 6 twice"),
        (["--temperatures", "0,0.0"], "--temperatures: found 0 twice"),
        (["--top-k-cap", 261, "--budgets", 6], "SpeculationConfig.top_k_cap: found 261, expected at most"),
        (["--temperatures", "-1"], "SamplingParams.temperature: found -1.0"),
        (["--temperatures", "nan"], "SamplingParams.temperature: found nan"),
        (["--batch", 0], "EngineConfig.slots: found 0"),
        (["--limit", 0], "--limit: found 0"),
        (["--dtype", "int8"], "--dtype: found 'int8'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_options_are_one_line(evaluate, tmp_path, options, message):
    result = evaluate(tmp_path / "run", *options)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.iterdir())


def test_prompt_too_long_is_named(evaluate, tmp_path, prompts):
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"id": "h-0", "turns": ["y" * 500]}) + "\n")
    result = evaluate(tmp_path / "run", "--prompts", path)
    assert result.exit_code == 2
    assert "prompt h-0 of huge: found 503 tokens, expected at most 399" in result.stderr


def test_drafter_of_another_tokenizer_is_refused(evaluate, folder, tmp_path):
    other = tmp_path / "drafter" / "tokenizer"
    shutil.copytree(folder, other)
    backend = Backend.from_file(str(other / "tokenizer.json"))
    backend.add_tokens(["more"])
    backend.save(str(other / "tokenizer.json"))
    result = evaluate(tmp_path / "run", "--drafter", other.parent)
    assert result.exit_code == 2
    assert "error: drafter tokenizer: found fingerprint" in result.stderr
    shutil.copyfile(folder / "tokenizer.json", other / "tokenizer.json")
    result = evaluate(tmp_path / "run", "--drafter", other.parent, "--top-k-cap", 261)
    assert "error: SpeculationConfig.top_k_cap" in result.stderr  # the next thing to be refused


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
