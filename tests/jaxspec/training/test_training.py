import dataclasses
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.model.families.config import DFlashConfig, ModelConfig, RopeConfig, read_dflash_config
from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.model.families.llama import layout_of as target_layout
from jaxspec.model.layers.basic import product
from jaxspec.model.layers.cache import write_rows
from jaxspec.model.layers.parameters import fill, weight_specs
from jaxspec.training.answers import AnswerConfig, Examples, read_answers, split_examples, write_answers
from jaxspec.training.batches import batch_order, steps_per_epoch
from jaxspec.training.checkpoint import read_checkpoint
from jaxspec.training.export import export_drafter
from jaxspec.training.loop import train
from jaxspec.training.loss import (
    TrainingBatch,
    block_hidden,
    decay_weights,
    drafter_loss,
    sample_anchors,
    tapped_features,
)
from jaxspec.training.prompts import (
    Prompt,
    file_prompts,
    invent_prompts,
    read_written_prompts,
    reads_like_a_request,
    write_prompts,
)
from jaxspec.training.run_config import RunConfig
from jaxspec.training.templates import template_prompts
from jaxspec.training.trainer import OptimiserConfig, Trainer, build_drafter, initial_parameters

TARGET = ModelConfig("llama", 61, 24, 32, 5, 3, 1, 8, 1e-5, RopeConfig(1e4), 256, False, False, (2,))
FULL = DFlashConfig(
    61, 24, 40, 2, 3, 1, 8, 1e-6, RopeConfig(1e4), 256, 5, 60, 5, (0, 2, 3), (0, 0), (False, False),
    output_multiplier=0.7, final_logit_softcapping=4.0, input_embedding_scale=1.5,
)  # fmt: skip
MIXED = dataclasses.replace(FULL, windows=(9, 0), causal=(True, False))
SLIDING = dataclasses.replace(FULL, windows=(9, 9), causal=(False, False))
ONE_LAYER = dataclasses.replace(FULL, num_hidden_layers=1, windows=(9,), causal=(True,))
CAUSAL = dataclasses.replace(FULL, causal=(True, True))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    random = np.random.default_rng(3)
    build = lambda: LlamaForCausalLM(TARGET, target_layout(TARGET, 1), jnp.float32)  # noqa: E731
    return fill(build, lambda s: jnp.asarray(random.normal(len(s.shape) == 1, 0.2, s.shape), s.dtype))


def random_parameters(config: DFlashConfig) -> dict[str, jax.Array]:
    """Weights far enough from their start for every part of the model to matter."""
    random = np.random.default_rng(4)
    return {k: v + jnp.asarray(random.normal(0, 0.25, v.shape), jnp.float32) for k, v in
            initial_parameters(config, 0).items()}  # fmt: skip


def random_batch(rows: int = 2, length: int = 24) -> TrainingBatch:
    random = np.random.default_rng(5)
    tokens = random.integers(3, 60, (rows, length))
    answer = np.zeros((rows, length), bool)
    for row in range(rows):
        answer[row, 6 + row : length - 1 - 3 * row] = True
    return TrainingBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(answer))


def features_of(target: LlamaForCausalLM, tokens: jax.Array, taps: tuple[int, ...]) -> jax.Array:
    return jax.jit(partial(tapped_features, target, taps=taps))(tokens)


def test_anchors_are_drawn_once_each_from_positions_that_have_a_label():
    answer = np.zeros((3, 20), bool)
    answer[0, 4:12] = True
    answer[0, 7] = False  # 6 has no label, 7 is none
    answer[1, 19] = True  # the last token has nothing after it
    draws = set()
    for seed in range(40):
        anchors, chosen = map(np.asarray, sample_anchors(jax.random.key(seed), jnp.asarray(answer), 4))
        first = anchors[0][chosen[0]]
        assert len(set(first)) == 4
        assert list(first) == sorted(first)
        draws |= set(first.tolist())
        assert not chosen[1:].any()
    assert draws == {4, 5, 8, 9, 10}


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_decay_is_the_published_one(block, gamma):
    np.testing.assert_allclose(decay_weights(block), np.exp(-np.arange(block - 1) / gamma), rtol=1e-6)


@pytest.mark.parametrize("config", [FULL, MIXED, SLIDING, CAUSAL], ids=["full", "mixed", "sliding", "causal"])
def test_training_pass_is_the_served_pass(target, config):
    """Every anchor's block, against pages filled by commits with all context before the anchor and rubbish after it."""
    drafter = build_drafter(config, random_parameters(config), jnp.float32)
    batch = random_batch()
    tapped = features_of(target, batch.tokens, config.target_layer_ids)
    anchors = jnp.asarray([[6, 11, 18], [7, 13, 23]], jnp.int32)
    trained = jax.jit(partial(block_hidden, drafter, target))(batch.tokens, tapped, anchors)
    serve = jax.jit(drafter.hidden)
    page_size, pages = 4, 14
    random = np.random.default_rng(6)
    table = jnp.asarray(random.permutation(pages)[:12].reshape(2, 6), jnp.int32)
    rubbish = jnp.asarray(random.normal(size=(pages, page_size, 1, 8)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    rows = drafter.context_keys_values(tapped, positions)
    for column in range(3):
        start = anchors[:, column]
        cache = write_rows(((rubbish, rubbish),) * 2, rows, table, positions, keep=positions < start[:, None])
        anchor = batch.tokens[jnp.arange(2), start]
        served = serve(target.embed(drafter.block_tokens(anchor, config.depth)), start, cache, table)
        np.testing.assert_allclose(trained[:, column], served, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", [FULL, MIXED], ids=["full", "mixed"])
def test_a_block_sees_what_is_before_its_anchor_and_nothing_else(target, config):
    drafter = build_drafter(config, random_parameters(config), jnp.float32)
    batch = random_batch(rows=1)
    tapped = features_of(target, batch.tokens, config.target_layer_ids)
    anchors = jnp.asarray([[8, 12]], jnp.int32)
    run = jax.jit(lambda tokens, features: block_hidden(drafter, target, tokens, features, anchors)[0])
    before = run(batch.tokens, tapped)
    for place in range(24):
        tokens = batch.tokens.at[0, place].set((batch.tokens[0, place] + 7) % 59)
        moved = np.asarray(jnp.abs(run(tokens, tapped) - before).max((1, 2)))
        assert (moved > 0).tolist() == [place == 8, place == 12], "a token is seen by the block that it anchors"
        moved = np.asarray(jnp.abs(run(batch.tokens, tapped.at[0, place].add(0.5)) - before).max((1, 2)))
        assert (moved > 1e-5).tolist() == [place < 8, place < 12], "features are seen strictly before the anchor"


def test_loss_is_the_formula(target):
    """Against NumPy, written from the published description, one query at a time."""
    for config in (FULL, MIXED):
        parameters = random_parameters(config)
        drafter = build_drafter(config, parameters, jnp.float32)
        batch = random_batch()
        tapped = features_of(target, batch.tokens, config.target_layer_ids)
        anchors, chosen = sample_anchors(jax.random.key(1), batch.answer, 14)
        assert not chosen.all(), "some rows of the batch must have too few positions"
        loss, tally = jax.jit(partial(drafter_loss, drafter, target))(batch, tapped, anchors, chosen)
        weights = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        expected = reference_loss(config, weights, target, batch, tapped, np.asarray(anchors), np.asarray(chosen))
        np.testing.assert_allclose(float(loss), expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(tally.correct, expected["correct"])
        np.testing.assert_allclose(tally.labels, expected["labels"])
        np.testing.assert_allclose((tally.prefix, tally.blocks), (expected["prefix"], expected["blocks"]))


def reference_loss(config, w, target, batch, tapped, anchors, chosen) -> dict:
    def norm(x, g):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * g

    def rope(x, position):  # x [heads, head_dim]
        half = config.head_dim // 2
        angle = position / 1e4 ** (np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def heads(x):
        return x.reshape(-1, config.head_dim)

    def block(sequence_features, anchor_token, start):
        features = norm(sequence_features[:start] @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = embedding[[anchor_token] + [config.mask_token_id] * config.depth] * config.input_embedding_scale
        for n in range(config.num_hidden_layers):
            p = f"layers.{n}."
            u = norm(x, w[p + "input_layernorm.weight"])

            def key_value(row, position, p=p):
                k = norm(heads(w[p + "self_attn.k_proj.weight"] @ row), w[p + "self_attn.k_norm.weight"])
                return rope(k, position)[0], (w[p + "self_attn.v_proj.weight"] @ row)

            context = [key_value(row, i) for i, row in enumerate(features)]
            own = [key_value(row, start + i) for i, row in enumerate(u)]
            out = np.zeros_like(x)
            for i in range(config.block_size):
                window = config.windows[n] or 10**9
                seen = [c for place, c in enumerate(context) if start + i - place < window]
                seen += own[: i + 1] if config.causal[n] else own
                q = norm(heads(w[p + "self_attn.q_proj.weight"] @ u[i]), w[p + "self_attn.q_norm.weight"])
                scores = rope(q, start + i) @ np.array([k for k, _ in seen]).T / np.sqrt(config.head_dim)
                share = np.exp(scores - scores.max(-1, keepdims=True))
                share /= share.sum(-1, keepdims=True)
                mixed = share @ np.array([v for _, v in seen])
                out[i] = w[p + "self_attn.o_proj.weight"] @ mixed.reshape(-1)
            x = x + out
            u = norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = u @ w[p + "mlp.gate_proj.weight"].T, u @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
        logits = norm(x, w["norm.weight"]) @ head.T * config.output_multiplier
        return config.final_logit_softcapping * np.tanh(logits / config.final_logit_softcapping)

    embedding = np.asarray(target.embed_tokens.weight[...], np.float64)
    head = np.asarray(target.lm_head.weight[...], np.float64)
    tokens, answer, tapped = (np.asarray(x) for x in (batch.tokens, batch.answer, tapped))
    total = weight = prefix = blocks = 0.0
    correct, labels = np.zeros(config.depth), np.zeros(config.depth)
    for row in range(len(tokens)):
        for start, real in zip(anchors[row], chosen[row], strict=True):
            if not real:
                continue
            logits = block(tapped[row].astype(np.float64), tokens[row, start], int(start))
            blocks += 1
            unbroken = True
            for k in range(1, config.block_size):
                place = start + k
                if place >= tokens.shape[1] or not answer[row, place]:
                    unbroken = False
                    continue
                decay = np.exp(-(k - 1) / (config.block_size / 2))
                total -= decay * (logits[k, tokens[row, place]] - np.log(np.exp(logits[k]).sum()))
                weight += decay
                labels[k - 1] += 1
                right = logits[k].argmax() == tokens[row, place]
                correct[k - 1] += right
                unbroken = unbroken and right
                prefix += unbroken
    return {"loss": total / weight, "correct": correct, "labels": labels, "prefix": prefix, "blocks": blocks}


def test_features_of_whole_sequences_are_causal(target):
    batch = random_batch(rows=1)
    before = features_of(target, batch.tokens, (0, 3))
    after = features_of(target, batch.tokens.at[0, 10].add(1), (0, 3))
    moved = np.asarray(jnp.abs(after - before).max(-1)[0])
    assert (moved[:10] == 0).all()
    assert (moved[10:] > 0).all()
    assert before.shape == (1, 24, 48)


def test_products_gradient_is_the_transposed_product_in_the_operands_dtype():
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((3, 4), (5, 4)))
    loss = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, b)))  # noqa: E731
    ours = jax.grad(loss(lambda a, b: product("ri,oi->ro", a, b)), (0, 1))(a, b)
    plain = jax.grad(loss(lambda a, b: jnp.einsum("ri,oi->ro", a, b)), (0, 1))(a, b)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    low = jax.grad(loss(lambda a, b: product("ri,oi->ro", a, b, jnp.float32)), (0, 1))
    text = str(jax.make_jaxpr(low)(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)))
    for shape in ("3,4", "5,4"):
        assert f"bf16[{shape}] = dot_general" in text
        assert f"f32[{shape}] = dot_general" not in text


def examples_of(count: int = 24, seed: int = 0) -> Examples:
    """Sequences of two lengths that count upwards, so that there is something to learn."""
    random = np.random.default_rng(seed)
    lengths = random.choice([14, 22], count)
    parts = [(3 + random.integers(0, 50) + np.arange(n)) % 50 + 3 for n in lengths]
    return Examples(
        np.concatenate(parts).astype(np.int32),
        np.cumsum([0, *lengths]),
        np.full(count, 4, np.int32),
        np.array([0.0, 1.0] * (count // 2), np.float32),
        np.array(["counting"] * count),
    )


RUN = RunConfig(steps=12, batch=4, anchors=6, lengths=(16, 24), log_every=2, evaluate_every=6, save_every=5, seed=7)


def test_every_epoch_sees_every_example_and_order_does_not_depend_on_the_start():
    examples = examples_of()
    per_epoch = steps_per_epoch(examples, RUN.batch, RUN.lengths)
    stream = batch_order(examples, RUN, 0)
    batches = [next(stream) for _ in range(2 * per_epoch)]
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        assert {int(i) for _, chosen in epoch for i in chosen} == set(range(len(examples)))
        assert all((examples.lengths[chosen] <= length).all() for length, chosen in epoch)
    later = batch_order(examples, RUN, 5)
    for length, chosen in batches[5:]:
        other = next(later)
        assert other[0] == length
        np.testing.assert_array_equal(other[1], chosen)


def test_interrupted_and_resumed_ends_like_uninterrupted(target, tmp_path):
    run = dataclasses.replace(RUN, lengths=(24,))
    examples, held_out = split_examples(examples_of(), 4, 0)
    whole, history = train(target, ONE_LAYER, examples, held_out, run, tmp_path / "a", False, lambda entry: None)

    def stop(entry):
        if entry["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, ONE_LAYER, examples, held_out, run, tmp_path / "b", False, stop)
    seen: list[int] = []
    resumed, again = train(
        target, ONE_LAYER, examples, held_out, run, tmp_path / "b", True, lambda entry: seen.append(entry["step"])
    )
    assert seen == [6, 8, 10, 12], "from the checkpoint of step 5 on"
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)
    assert [entry["step"] for entry in again] == [entry["step"] for entry in history]
    assert again[-1]["held_out"] == history[-1]["held_out"]
    restored, taken = read_checkpoint(tmp_path / "b" / "checkpoint.safetensors")
    assert taken == history[-1]["step"]
    for name, value in restored.items():
        np.testing.assert_array_equal(value, whole[name])
    assert json.loads((tmp_path / "b" / "figures.json").read_text())["source counting"]["examples"] == len(held_out)
    other = dataclasses.replace(run, learning_rate=1e-3)
    with pytest.raises(ValueError, match="another run"):
        train(target, ONE_LAYER, examples, held_out, other, tmp_path / "b", True, lambda entry: None)


def test_a_tiny_set_is_learnt_and_the_target_stays_as_it_was(target):
    before = np.asarray(target.embed_tokens.weight[...]).copy()
    config = dataclasses.replace(FULL, output_multiplier=1.0, final_logit_softcapping=0.0, input_embedding_scale=1.0)
    trainer = Trainer(target, config, OptimiserConfig(120, learning_rate=1e-2), anchors=10, seed=0)
    state, batch = trainer.initial_state(), random_batch()
    first = trainer.evaluate(state.parameters, batch).summary()
    for _ in range(120):
        state, _ = trainer.step(state, batch)
    last = trainer.evaluate(state.parameters, batch).summary()
    assert int(state.step) == 120
    assert first["accuracy"][0] < 0.3
    assert min(last["accuracy"]) > 0.9
    assert last["tau"] > first["tau"] + 1
    np.testing.assert_array_equal(before, target.embed_tokens.weight[...])


@pytest.mark.parametrize("config", [FULL, MIXED, SLIDING, CAUSAL], ids=["full", "mixed", "sliding", "causal"])
def test_export_reads_back(config, tmp_path):
    parameters = random_parameters(config)
    history = [{"step": 1, "loss": 2.0, "tau": 1.5, "held_out": {"loss": 2.1, "tau": 1.4}}]
    export_drafter(tmp_path, config, parameters, {"steps": 1}, history)
    assert read_dflash_config(json.loads((tmp_path / "config.json").read_text())) == config
    tensors = load_file(tmp_path / "model.safetensors")
    specs = weight_specs(lambda: build_drafter(config, parameters, jnp.bfloat16))
    assert {spec.name: spec.shape for spec in specs} == {name: value.shape for name, value in tensors.items()}
    assert len(tensors) == 11 * config.num_hidden_layers + 3
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, parameters[name].astype(jnp.bfloat16))
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 1}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_export_refuses_what_no_published_key_says(tmp_path):
    config = dataclasses.replace(FULL, windows=(9, 5), causal=(True, True))
    with pytest.raises(ValueError, match="windows: found"):
        export_drafter(tmp_path, config, {}, {}, [])


class EchoEngine:
    """Answers with the prompt's last token, one a step, as many as its first token says."""

    def __init__(self, fail_at: int | None = None):
        self.config = SimpleNamespace(slots=2)
        self.fail_at = fail_at
        self.requests: dict[int, list[int]] = {}
        self.sampling: list = []
        self.peak = 0

    def add(self, prompt, sampling) -> int:
        self.requests[len(self.sampling)] = [*prompt[-1:], *([prompt[-1]] * (prompt[0] % 5))]
        self.sampling.append(sampling)
        self.peak = max(self.peak, len(self.requests))
        return len(self.sampling) - 1

    def step(self) -> list:
        outputs = []
        for request, left in list(self.requests.items())[: self.config.slots]:
            if request == self.fail_at:
                raise KeyboardInterrupt
            outputs.append(SimpleNamespace(request_id=request, tokens=[left.pop()], finish_reason=None))
            if not left:
                outputs[-1].finish_reason = "stop"
                del self.requests[request]
        return outputs

    def generate(self, prompts, sampling) -> list:
        texts = (
            "What is the capital of Peru?",
            "Tell me a long story about bees.",
            "cut off",
            "no",
            "the the the the the.",
        )
        reasons = "stop", "stop", "length", "stop", "stop"
        place = [params.seed % 5 for params in sampling]
        return [SimpleNamespace(tokens=list(texts[i].encode()), finish_reason=reasons[i]) for i in place]


def echo_engine(fail_at: int | None = None) -> Any:
    return EchoEngine(fail_at)


def encode(prompt: Prompt) -> list[int]:
    return list(b"<user>" + prompt.text.encode() + b"</user>")


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


def test_invented_prompts_read_like_requests_and_differ():
    decode = lambda tokens: bytes(tokens).decode()  # noqa: E731
    found = invent_prompts(echo_engine(), encode, decode, 5, 0, lambda *figures: None)
    assert {prompt.text for prompt in found} == {"What is the capital of Peru?", "Tell me a long story about bees."}
    assert not reads_like_a_request("")
    assert not reads_like_a_request("again and again and again and again and again.")


def test_prompts_from_files_and_templates(tmp_path):
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
    prompts = template_prompts(1200, 0)
    assert len({p.text for p in prompts}) == len(prompts) >= 1150
    assert {p.source for p in prompts} == {f"template-{kind}" for kind in ("chat", "explain", "code", "arithmetic")}
    assert prompts == template_prompts(1200, 0)
    assert not any("{" in p.text for p in prompts)
