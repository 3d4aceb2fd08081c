"""The loss against its formula, and its pass against the pass that serves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.model.layers.cache import write_rows
from jaxspec.training.loss import block_hidden, decay_weights, drafter_loss, sample_anchors, tapped_features
from jaxspec.training.trainer import build_drafter
from tests.support.training import CAUSAL, FULL, MIXED, SLIDING, random_batch, random_parameters


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
