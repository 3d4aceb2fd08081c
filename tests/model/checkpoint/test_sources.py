"""Published checkpoints read as named tensors: safetensors folders and GGUF files."""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.families.config import RopeConfig, read_model_config

RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors_are_read_a_few_rows_at_a_time(folder, dtype):
    table = RNG.standard_normal((9, 4)).astype(dtype)
    save_file({"table": table, "norm": table[:, 0].copy()}, folder / "model.safetensors")
    source = open_source(folder)
    assert source.tensors["table"].shape == (9, 4)
    assert source.tensors["table"].dtype == np.dtype(dtype).name
    for start, stop in ((0, None), (0, 3), (4, 9)):
        np.testing.assert_array_equal(source.read("table", start, stop), table[start:stop])
        np.testing.assert_array_equal(source.read("norm", start, stop), table[start:stop, 0])


def write_shards(folder: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model-1.safetensors")
    save_file({"b": np.full(5, 2, np.float32)}, folder / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_safetensors(folder):
    write_shards(folder)
    source = open_source(folder)
    assert set(source.tensors) == {"a", "b"}
    np.testing.assert_array_equal(source.read("b"), np.full(5, 2, np.float32))


def test_a_shard_cut_short_while_it_is_read_is_one_line(folder):
    write_shards(folder)
    source = open_source(folder)
    damage_truncate(folder)
    np.testing.assert_array_equal(source.read("a"), np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"model-2\.safetensors: ends within b; it has been cut short"):
        source.read("b")


def test_the_fingerprint_follows_every_file(folder):
    write_shards(folder)
    seen = {open_source(folder).fingerprint}
    assert open_source(folder).fingerprint in seen
    save_file({"b": np.full(5, 3, np.float32)}, folder / "model-2.safetensors")
    seen.add(open_source(folder).fingerprint)
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    seen.add(open_source(folder).fingerprint)
    (folder / "tokenizer.json").write_text("{}")
    seen.add(open_source(folder).fingerprint)
    assert len(seen) == 4


def damage_truncate(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def damage_header(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(b"\xff" * 40)


def damage_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"b"', '"c"'))


def damage_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def remove_shard(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def swap_shards(folder: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def double_tensor(folder: Path) -> None:
    save_file({"b": np.ones(5, np.float32), "a": np.full((2, 3), 7, np.float32)}, folder / "model-2.safetensors")


def double_unlisted_tensor(folder: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32), "c": np.ones(1, np.float32)}, folder / "model-1.safetensors")
    save_file({"b": np.ones(5, np.float32), "c": np.ones(1, np.float32)}, folder / "model-2.safetensors")


def hold_unlisted_tensor(folder: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32), "c": np.ones(1, np.float32)}, folder / "model-1.safetensors")


def name_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-9.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}, folder / "model-2.safetensors")


def nest_json(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_shards, r"model-1\.safetensors: holds a, which belongs in model-2\.safetensors"),
        (double_tensor, r"model-2\.safetensors: holds a, which belongs in model-1\.safetensors"),
        (double_unlisted_tensor, r"model-2\.safetensors: holds c, which belongs in model-1\.safetensors"),
        (hold_unlisted_tensor, r"index\.json: does not list c, which model-1\.safetensors holds"),
        (name_missing_shard, r"model-9\.safetensors: missing"),
        (nest_json, r"config\.json: not JSON"),
        (damage_truncate, r"model-2\.safetensors: truncated or not a safetensors file"),
        (damage_header, r"model-1\.safetensors: truncated or not a safetensors file"),
        (damage_index, r"index\.json: lists c, which model-2\.safetensors does not hold"),
        (damage_json, r"config\.json: not JSON"),
        (remove_shard, r"model-2\.safetensors: missing"),
        (remove_config, r"config\.json: missing"),
    ],
)
def test_a_damaged_folder_is_one_line(folder, damage, message):
    write_shards(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shards", [None, {}, [], ["a"], "x", 5])
def test_an_index_without_its_table_is_one_line(folder, shards):
    write_shards(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match=r"index\.json weight_map: found .*, expected an object of tensors and files"):
        open_source(folder)


@pytest.mark.parametrize("file", [1, None, ["model-1.safetensors"], "", "..", "a/b", "../model-1.safetensors", "a\0"])
def test_an_index_that_names_no_file_is_one_line(folder, file):
    write_shards(folder)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match=r"index\.json weight_map c: found .*, expected a safetensors file's name"):
        open_source(folder)


def test_a_path_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="nothing there, expected a folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="a file of another kind, expected a folder"):
        open_source(tmp_path / "model.bin")


# GGUF: what a converter of llama files does, written from the format's description.

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of GGUF's llama files: rotated pairs side by side."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, extra: Mapping[str, np.ndarray] = {}, arch: str = "llama") -> dict[str, np.ndarray]:
    """Writes a one-layer file with unquantised and Q8_0 tensors; returns the weights that Q8_0 did not round."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(10)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_eos_token_id(3)
    q, k = (RNG.standard_normal((n * HEAD_DIM, HIDDEN)).astype(np.float32) for n in (HEADS, KV_HEADS))
    v = RNG.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float16)
    writer.add_tensor("blk.0.attn_q.weight", interleave(q, HEADS))
    writer.add_tensor("blk.0.attn_k.weight", interleave(k, KV_HEADS))
    writer.add_tensor("blk.0.attn_v.weight", v)
    embedding = RNG.standard_normal((10, HIDDEN)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(embedding, kind), raw_dtype=kind)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prefix = "model.layers.0.self_attn."
    return {f"{prefix}q_proj.weight": q, f"{prefix}k_proj.weight": k, f"{prefix}v_proj.weight": v}


def test_gguf_rows_come_in_half_rotation_order(tmp_path):
    weights = write_gguf(tmp_path / "m.gguf")
    source = open_source(tmp_path / "m.gguf")
    for name, expected in weights.items():
        np.testing.assert_array_equal(source.read(name), expected)
        np.testing.assert_array_equal(source.read(name, 3, 13), expected[3:13])
    dtypes = {name.split(".")[-2]: tensor.dtype for name, tensor in source.tensors.items()}
    assert dtypes == {"q_proj": "float32", "k_proj": "float32", "v_proj": "float16", "embed_tokens": "bfloat16"}


def test_gguf_as_transformers_reads_it(tmp_path):
    rest = {
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (48, HIDDEN),
        "blk.0.ffn_up": (48, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 48),
    }
    extra = {f"{name}.weight": RNG.standard_normal(shape).astype(np.float32) for name, shape in rest.items()}
    write_gguf(tmp_path / "m.gguf", extra)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    source = open_source(tmp_path / "m.gguf")
    assert set(theirs) - {"lm_head.weight"} == set(source.tensors)
    for name in source.tensors:
        np.testing.assert_array_equal(source.read(name), theirs[name].numpy(), err_msg=name)


def test_gguf_metadata_become_a_config(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    config = read_model_config(open_source(tmp_path / "m.gguf").config)
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == ("llama", 10, 32, 48)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert config.rope == RopeConfig(theta=500000.0)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (3,)
    assert config.max_position_embeddings == 64
    write_gguf(tmp_path / "untied.gguf", {"output.weight": np.zeros((10, HIDDEN), np.float32)})
    assert not read_model_config(open_source(tmp_path / "untied.gguf").config).tie_word_embeddings


@pytest.mark.parametrize(
    ("factor", "found"), [(8.0, True), (32.0, True), (5.0, False)], ids=["llama-3.1", "llama-3.2", "unknown"]
)
def test_gguf_frequency_factors_become_rope_scaling(tmp_path, factor, found):
    scaled = RopeConfig(500000.0, "llama3", factor, 1.0, 4.0, 8192)
    factors = RopeConfig(500000.0).inverse_frequencies(HEAD_DIM) / scaled.inverse_frequencies(HEAD_DIM)
    write_gguf(tmp_path / "m.gguf", {"rope_freqs.weight": factors})
    if found:
        assert read_model_config(open_source(tmp_path / "m.gguf").config).rope == scaled
    else:
        with pytest.raises(ValueError, match=r"rope_freqs\.weight: found factors"):
            open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.3, 0.9], ids=str)
def test_a_truncated_gguf_is_one_line(tmp_path, keep):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"m\.gguf: truncated or not a GGUF file") as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


def test_another_gguf_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", arch="gemma3")
    with pytest.raises(ValueError, match=r"general\.architecture: found 'gemma3', only 'llama' is supported"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", struct.pack("<II", 4, 0)),
        ("llama.attention.head_count", struct.pack("<Ii", 5, -4)),
        ("llama.attention.head_count_kv", struct.pack("<If", 6, 2.0)),
        ("llama.embedding_length", struct.pack("<II", 4, 2**32 - 1)),
        ("llama.block_count", struct.pack("<II", 4, 10**9)),
        ("llama.context_length", struct.pack("<II", 4, 0)),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, np.nan)),
        ("llama.rope.freq_base", struct.pack("<If", 6, np.inf)),
        ("tokenizer.ggml.eos_token_id", struct.pack("<II", 4, 10)),
    ],
)
def test_gguf_metadata_that_do_not_fit_are_refused_by_name(tmp_path, key, value):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    raw = path.read_bytes()
    place = raw.index(len(key).to_bytes(8, "little") + key.encode()) + 8 + len(key)
    path.write_bytes(raw[:place] + value + raw[place + 8 :])  # Type and value, four bytes each.
    with pytest.raises(ValueError, match=rf"m\.gguf: metadata {re.escape(key)}: found .*, expected") as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


def half_floats(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view(np.float16).astype(np.float32)


def dequantised(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Q8_0 and Q4_1 from their definitions: blocks of 32 weights, d·q and d·q + m."""
    raw = np.asarray(tensor.data)
    if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return raw
    rows = raw.shape[0]
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
        blocks = raw.reshape(rows, -1, 34)
        return (half_floats(blocks[..., :2]) * blocks[..., 2:].view(np.int8)).reshape(rows, -1)
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    blocks = raw.reshape(rows, -1, 20)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (half_floats(blocks[..., :2]) * nibbles + half_floats(blocks[..., 2:4])).reshape(rows, -1)


REAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def block_name(name: str) -> str:
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{BLOCK[kind]}.weight"


def test_the_real_model(smollm2_gguf):
    """Weights of SmolLM2 against a dequantisation of our own (its logits are compared with transformers elsewhere)."""
    source = open_source(smollm2_gguf)
    config = read_model_config(source.config)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    reader = gguf.GGUFReader(smollm2_gguf)
    assert len(source.tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        if tensor.name.startswith(("blk.7.", "blk.29.", "token", "output")):
            expected = dequantised(tensor)
            name = REAL_NAMES[tensor.name] if tensor.name in REAL_NAMES else block_name(tensor.name)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:  # Back from pairs to halves, head by head.
                pairs = expected.reshape(-1, 32, 2, 576)
                expected = pairs.swapaxes(1, 2).reshape(expected.shape)
            np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
