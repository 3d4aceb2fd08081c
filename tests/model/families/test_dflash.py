"""The drafter against float64 NumPy, written from the published description of DFlash and not from our module."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.model.families.config import DFlashConfig, RopeConfig, check_drafter, read_dflash_config
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import empty_cache, write_rows
from jaxspec.sharding.mesh import make_mesh
from jaxspec.speculation.drafting import dflash_drafting
from jaxspec.speculation.slot_table import empty_slots
from tests.support.builders import DFLASH, GROUPED, on_mesh, tiny_dflash, tiny_target

TARGET = replace(GROUPED, num_hidden_layers=3)
TAPS = (0, 1)
BASE = replace(
    DFLASH,
    num_hidden_layers=3,
    head_dim=6,
    num_target_layers=3,
    target_layer_ids=TAPS,
    rope=RopeConfig(theta=500.0),
    windows=(0, 6, 0),
    causal=(False, True, False),
)
VARIANTS = {
    "full and sliding": BASE,
    "sliding, not causal": replace(BASE, causal=(False, False, False)),
    "causal everywhere": replace(BASE, causal=(True, True, True)),
    "scaled": replace(BASE, input_embedding_scale=3.0, output_multiplier=0.4, final_logit_softcapping=1.5),
}


def weights_of(module: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf.get_value(), np.float64) for path, leaf in flat}


def reference(
    config: DFlashConfig,
    weights: dict[str, np.ndarray],
    embedding: np.ndarray,
    head: np.ndarray,
    features: np.ndarray,
    anchor: int,
    positions: np.ndarray | None = None,
) -> np.ndarray:
    """Log-probs [block_size - 1, vocab] after a context of processed tokens.

    Args:
      features: [start, taps * hidden]; the anchor stands at position `start`.
      positions: of the features, if not 0, 1, …, start - 1.
    """
    start, size, heads = len(features), config.block_size, config.num_attention_heads
    kv_heads, width = config.num_key_value_heads, config.head_dim
    context_positions = np.arange(start) if positions is None else positions
    block_positions = start + np.arange(size)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    def rope(x: np.ndarray, at: np.ndarray) -> np.ndarray:  # x [rows, heads, width]
        angle = at[:, None, None] * config.rope.theta ** -(np.arange(0, width, 2) / width)
        turn = np.exp(1j * angle)
        pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    context = norm(linear(features, "fc"), "hidden_norm")
    tokens = [anchor] + [config.mask_token_id] * (size - 1)
    x = embedding[tokens] * config.input_embedding_scale
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        u = norm(x, f"{name}.input_layernorm")
        both = np.concatenate([context, u])
        at = np.concatenate([context_positions, block_positions])
        q = norm(linear(u, f"{name}.self_attn.q_proj").reshape(size, heads, width), f"{name}.self_attn.q_norm")
        k = norm(linear(both, f"{name}.self_attn.k_proj").reshape(-1, kv_heads, width), f"{name}.self_attn.k_norm")
        v = linear(both, f"{name}.self_attn.v_proj").reshape(-1, kv_heads, width)
        q, k = rope(q, block_positions), rope(k, at)
        mixed = np.zeros((size, heads, width))
        for head_index in range(heads):
            source = head_index // (heads // kv_heads)
            for slot in range(size):
                seen = np.ones(start + size, bool)
                if config.causal[layer]:
                    seen[start + slot + 1 :] = False
                if config.windows[layer]:
                    seen[:start] &= block_positions[slot] - np.arange(start) < config.windows[layer]
                score = k[seen, source] @ q[slot, head_index] / np.sqrt(width)
                probability = np.exp(score - score.max())
                mixed[slot, head_index] = probability @ v[seen, source] / probability.sum()
        x = x + linear(mixed.reshape(size, -1), f"{name}.self_attn.o_proj")
        u = norm(x, f"{name}.post_attention_layernorm")
        gate = linear(u, f"{name}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(u, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    logits = norm(x, "norm")[1:] @ head.T * config.output_multiplier
    if config.final_logit_softcapping > 0:
        logits = config.final_logit_softcapping * np.tanh(logits / config.final_logit_softcapping)
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


class Pair(nnx.Module):
    def __init__(self, drafter: nnx.Module, target: nnx.Module):
        self.drafter, self.target = drafter, target


class Session:
    """Sequences of one batch: context rows inserted piece by piece into pages, and candidates drawn from them."""

    WIDTH, PAGE = 9, 4

    def __init__(self, config: DFlashConfig, batch: int, devices: int = 1):
        self.drafter, self.target = tiny_dflash(config, devices), tiny_target(TARGET, devices)
        pages = batch * self.WIDTH
        self.cache = empty_cache(
            self.drafter.cache_rows, pages, self.PAGE, self.drafter.layout, make_mesh(devices), "float32"
        )
        self.table = np.random.default_rng(0).permutation(pages).reshape(batch, self.WIDTH).astype(np.int32)
        self.length = np.zeros(batch, np.int32)

        def insert(pair: Any, cache: Any, features: Any, positions: Any, keep: Any, table: Any) -> Any:
            drafting = dflash_drafting(pair.drafter, pair.target, config.depth, config.vocab_size)
            return write_rows(cache, drafting.context_rows(features, positions), table, positions, keep)

        def propose(pair: Any, state: Any, cache: Any, table: Any) -> Any:
            return dflash_drafting(pair.drafter, pair.target, config.depth, config.vocab_size).propose(
                state, cache, table
            )

        pair = Pair(self.drafter, self.target)
        # On a larger mesh the pools are split; programs there are tested through the engine.
        assert devices == 1
        self._insert, self._propose = on_mesh(1, pair, insert), on_mesh(1, pair, propose)

    def insert(self, features: np.ndarray, count: np.ndarray) -> None:
        """Adds the first `count` of features [batch, rows, taps * hidden] at the next positions."""
        places = np.arange(features.shape[1])
        positions = (self.length[:, None] + places).astype(np.int32)
        self.cache = self._insert(self.cache, features, positions, places < count[:, None], self.table)
        self.length = (self.length + count).astype(np.int32)

    def log_probs(self, anchors: np.ndarray) -> np.ndarray:
        """[batch, block_size - 1, vocab], by token id."""
        slots = empty_slots(len(anchors), TARGET.vocab_size)
        state = replace(slots, anchor=anchors.astype(np.int32), length=self.length)
        candidates = self._propose(state, self.cache, self.table)
        assert (np.diff(candidates.log_probs, axis=-1) <= 0).all()
        result = np.empty(candidates.log_probs.shape)
        np.put_along_axis(result, np.asarray(candidates.tokens), np.asarray(candidates.log_probs), -1)
        return result

    def reference(self, features: np.ndarray, anchor: int, **changes: Any) -> np.ndarray:
        target = weights_of(self.target)
        embedding = target["embed_tokens.weight"]
        return reference(
            self.drafter.config, weights_of(self.drafter), embedding, embedding, features, anchor, **changes
        )


def random_features(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=(*shape, len(TAPS) * TARGET.hidden_size)).astype(np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_drafter_follows_the_formulas(variant: str) -> None:
    """Contexts from none to past the window by more than a block, so every edge of the window is crossed."""
    config = VARIANTS[variant]
    starts = np.array([0, 1, 4, 5, 6, 7, 10, 15, 29], np.int32)
    rng = np.random.default_rng(3)
    features = random_features(rng, len(starts), 30)
    anchors = rng.integers(0, TARGET.vocab_size, len(starts))
    session = Session(config, len(starts))
    session.insert(features, starts)
    found = session.log_probs(anchors)
    for row, start in enumerate(starts):
        expected = session.reference(features[row, :start], int(anchors[row]))
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)


def test_context_inserted_piece_by_piece_equals_one_insertion() -> None:
    rng = np.random.default_rng(4)
    batch, rows = 4, 30
    features = random_features(rng, batch, rows)
    anchors = rng.integers(0, TARGET.vocab_size, batch)
    pieces, whole = Session(BASE, batch), Session(BASE, batch)
    while (pieces.length < rows).any():
        # As rounds commit: up to a block at a time, the rows after the accepted ones being leftovers.
        part = random_features(rng, batch, BASE.block_size)
        count = np.minimum(rng.integers(1, BASE.block_size + 1, batch), rows - pieces.length)
        for row in range(batch):
            done = pieces.length[row]
            part[row, : count[row]] = features[row, done : done + count[row]]
        pieces.insert(part, count)
    whole.insert(features, np.full(batch, rows))
    for a, b in zip(jax.tree.leaves(pieces.cache), jax.tree.leaves(whole.cache), strict=True):
        used = pieces.table[:, : rows // Session.PAGE]
        np.testing.assert_allclose(np.asarray(a)[used], np.asarray(b)[used], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pieces.log_probs(anchors), whole.log_probs(anchors), rtol=1e-4, atol=1e-4)


def test_what_would_be_wrong_is_seen() -> None:
    """Taps in another order, positions off by one, a row too few, another anchor: each moves the result by far more."""
    rng = np.random.default_rng(5)
    features = random_features(rng, 1, 20)
    session = Session(BASE, 1)
    session.insert(features, np.array([20]))
    found = session.log_probs(np.array([9]))[0]
    swapped = np.concatenate(np.split(features[0], 2, axis=-1)[::-1], -1)
    right = session.reference(features[0], 9)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
    for wrong in (
        session.reference(swapped, 9),
        session.reference(features[0], 9, positions=np.arange(20) + 1),
        session.reference(features[0], 9, positions=np.arange(20) - 1),
        session.reference(features[0, :-1], 9),
        session.reference(features[0, 1:], 9),
        session.reference(features[0], 10),
    ):
        assert np.abs(wrong - found).max() > 0.01


def test_features_come_from_the_tapped_layers_of_processed_tokens() -> None:
    """End to end: the round's own prefill path against the formulas over the target's residual streams."""
    session = Session(BASE, 1)
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, TARGET.vocab_size, (1, 12)).astype(np.int32)
    target = session.target
    pools = empty_cache(target.cache_rows, 1, 1, target.layout, make_mesh(1), "float32")
    batch = ForwardBatch(
        tokens=jnp.asarray(tokens),
        positions=jnp.arange(12, dtype=jnp.int32)[None],
        page_table=jnp.ones((1, 1), jnp.int32),
        context_length=jnp.zeros(1, jnp.int32),
        visibility=jnp.tril(jnp.ones((1, 12, 12), bool)),
    )
    streams = np.asarray(on_mesh(1, target, lambda m, b, c: m(b, c, (0, 1, 2)).tapped)(batch, pools))
    layers = np.split(streams[0], 3, axis=-1)
    tapped = np.asarray(on_mesh(1, target, lambda m, b, c: m(b, c, BASE.target_layer_ids).tapped)(batch, pools))
    session.insert(tapped[:, :11], np.array([11]))
    found = session.log_probs(tokens[:, 11])[0]
    right = session.reference(np.concatenate([layers[0], layers[1]], -1)[:11], int(tokens[0, 11]))
    shifted = session.reference(np.concatenate([layers[1], layers[2]], -1)[:11], int(tokens[0, 11]))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
    assert np.abs(shifted - found).max() > 0.01


def test_fewer_tokens_may_be_drafted_than_the_block_has() -> None:
    """A shorter block is a block: without layers that look ahead, its slots do not notice."""
    config = replace(BASE, causal=(True, True, True))
    session = Session(config, 1)
    rng = np.random.default_rng(7)
    session.insert(random_features(rng, 1, 8), np.array([8]))
    full = session.log_probs(np.array([3]))

    def short(pair: Any, state: Any, cache: Any, table: Any) -> Any:
        return dflash_drafting(pair.drafter, pair.target, 3, config.vocab_size).propose(state, cache, table)

    state = replace(empty_slots(1, TARGET.vocab_size), anchor=np.array([3], np.int32), length=session.length)
    candidates = on_mesh(1, Pair(session.drafter, session.target), short)(state, session.cache, session.table)
    assert candidates.tokens.shape == (1, 3, config.vocab_size)
    found = np.take_along_axis(full[:, :3], np.asarray(candidates.tokens), -1)
    np.testing.assert_allclose(candidates.log_probs, found, rtol=1e-4, atol=1e-4)


PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "num_target_layers": 8,
    "block_size": 10,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 5]},
}


def published(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (PUBLISHED | changes).items() if value is not None}


class TestConfig:
    def test_block_size_stands_in_either_place_and_the_inner_one_wins(self) -> None:
        inner = PUBLISHED["dflash_config"]
        assert read_dflash_config(PUBLISHED).block_size == 10
        assert read_dflash_config(published(block_size=None, dflash_config=inner | {"block_size": 6})).block_size == 6
        assert read_dflash_config(published(dflash_config=inner | {"block_size": 6})).block_size == 6
        assert read_dflash_config(published(block_size=None)).block_size == 16
        assert read_dflash_config(PUBLISHED).depth == 9

    def test_taps_by_default_lie_evenly_from_the_second_layer_to_the_third_last(self) -> None:
        for layers, target_layers, expected in (
            (5, 36, (1, 9, 17, 25, 33)),
            (5, 32, (1, 8, 15, 22, 29)),
            (5, 24, (1, 6, 11, 16, 21)),
            (1, 30, (15,)),
        ):
            raw = published(
                num_hidden_layers=layers, num_target_layers=target_layers, dflash_config={"mask_token_id": 63}
            )
            assert read_dflash_config(raw).target_layer_ids == expected
        assert read_dflash_config(PUBLISHED).target_layer_ids == (1, 5)

    def test_sliding_layers_are_causal_unless_the_config_says_otherwise(self) -> None:
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
        inner = PUBLISHED["dflash_config"]
        config = read_dflash_config(published(**kinds))
        assert (config.windows, config.causal) == ((12, 0), (True, False))
        assert read_dflash_config(published(**kinds, is_causal=False)).causal == (False, False)
        assert read_dflash_config(published(**kinds, is_causal=True)).causal == (True, True)
        assert read_dflash_config(published(**kinds, dflash_config=inner | {"causal": False})).causal == (False, False)
        with pytest.raises(ValueError, match="sliding_window: missing"):
            read_dflash_config(published(layer_types=kinds["layer_types"]))

    def test_scales_are_read_from_either_place(self) -> None:
        inner = PUBLISHED["dflash_config"] | {"output_multiplier": 0.5, "final_logit_softcapping": 30.0}
        config = read_dflash_config(published(dflash_config=inner, input_embedding_scale=2.0))
        assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (2, 0.5, 30)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel .* is not supported"),
            ({"dflash_config": PUBLISHED["dflash_config"] | {"selector_rank": 256}}, "DFlash 2.* is not supported"),
            ({"conv_kernel_size": 2}, "DFlash 2.* is not supported"),
            ({"architectures": ["Eagle3"]}, "found 'Eagle3', expected 'DFlashDraftModel'"),
            ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id: missing"),
            ({"attention_bias": True}, "attention_bias: found True"),
            ({"dflash_config": PUBLISHED["dflash_config"] | {"sample_from_anchor": True}}, "sample_from_anchor"),
            ({"rope_theta": None}, "rope_theta: missing"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, "'linear'"),
            ({"layer_types": ["full_attention"]}, "layer_types"),
        ],
    )
    def test_what_is_not_supported_is_refused_by_name(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_dflash_config(published(**changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 48}, "hidden_size: found 48, but the target has 32"),
            ({"vocab_size": 65}, "vocab_size: found 65, but the target has 64"),
            ({"num_target_layers": 4}, "num_target_layers: found 4, but the target has 3"),
            ({"target_layer_ids": (0, 2)}, "target_layer_ids: found 2, expected 0 to 1"),
            ({"target_layer_ids": (-1,)}, "target_layer_ids: found -1, expected 0 to 1"),
            ({"mask_token_id": 64}, "mask_token_id: found 64, expected 0 to 63"),
            ({"block_size": 1}, "block_size: found 1, expected at least 2"),
        ],
    )
    def test_a_drafter_of_another_target_is_refused_by_field(self, changes: dict[str, Any], message: str) -> None:
        check_drafter(TARGET, BASE)
        with pytest.raises(ValueError, match=message):
            check_drafter(TARGET, replace(BASE, **changes))
