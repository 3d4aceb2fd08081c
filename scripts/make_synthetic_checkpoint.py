"""Writes a checkpoint with Kimi K2.6's tensor names, sizes and formats, cut to a few layers and filled with noise.

For measuring conversion and loading at scale. Names, shapes, dtypes, shards and the order within a shard are those of
the published INT4 files: a layer a shard, then embedding, head and final norm, then the vision projector.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer

from jaxspec.model.checkpoint.safetensors_source import CONFIG, INDEX
from jaxspec.model.quantization.int4 import GROUP, INT4, PER_WORD
from jaxspec.serve.cli.startup import bad_input

HIDDEN, INNER, DENSE_INNER, EXPERTS = 7168, 2048, 18432, 384
ATTENTION = {
    "q_a_proj": (1536, HIDDEN),
    "q_a_layernorm": (1536,),
    "q_b_proj": (12288, 1536),
    "kv_a_proj_with_mqa": (576, HIDDEN),
    "kv_a_layernorm": (512,),
    "kv_b_proj": (16384, 512),
    "o_proj": (HIDDEN, 8192),
}
TEXT: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE_INNER,
    "moe_intermediate_size": INNER,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "quantization_config": INT4.section,
}
SAFETENSORS = {"F32": 4, "I32": 4, "BF16": 2}  # In the order in which a file holds them.

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def main(
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    layers: Annotated[
        int, typer.Option(min=2, max=61, help="Of which the first is dense; each further one takes 9.8 GB.")
    ] = 3,
    vocabulary: Annotated[int, typer.Option(min=8, help="Rows of embedding and head, 163840 in the original.")] = 16384,
) -> None:
    """Write a checkpoint of Kimi K2.6's true names and sizes, cut to a few layers, its weights noise."""
    with bad_input():
        output.mkdir(parents=True)
    shards = [_layer(f"language_model.model.layers.{layer}.", dense=layer == 0) for layer in range(layers)]
    shards += [_ends(vocabulary), _projector()]
    noise = Noise()
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        total += write_shard(output / file, shapes, noise)
        weight_map |= dict.fromkeys(shapes, file)
        print(f"{output / file}: {total / 1e9:.2f} GB so far")
    (output / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**TEXT, "num_hidden_layers": layers, "vocab_size": vocabulary, "dtype": "bfloat16"},
        "tie_word_embeddings": False,
    }
    (output / CONFIG).write_text(json.dumps(config, indent=2))


class Noise:
    """Bytes for tensors, fast: pieces of two tables, each tensor's from a place of its own.

    Scales come from the table of weights too; their signs do not matter here.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        size = 2**24 + 2**16 + 1  # Not a multiple of any row.
        self._integers = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        self._floats = (rng.standard_normal(size // 2) / 50).astype(ml_dtypes.bfloat16).tobytes()

    def pieces(self, name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[bytes]:
        """The bytes of a tensor."""
        left = int(np.prod(shape)) * SAFETENSORS[dtype]
        if name.endswith("weight_shape"):
            yield np.array(described(name), np.int32).tobytes()
            return
        if dtype == "F32":
            yield np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32).tobytes()
            return
        table = self._integers if dtype == "I32" else self._floats
        place = 2 * (zlib.crc32(name.encode()) % (len(table) // 2))
        while left:
            piece = table[place : place + left]
            yield piece
            left, place = left - len(piece), 0


def described(name: str) -> tuple[int, int]:
    """What the `weight_shape` called `name` says."""
    return (HIDDEN, INNER) if ".down_proj." in name else (INNER, HIDDEN)


def write_shard(path: Path, shapes: Shapes, noise: Noise) -> int:
    """Writes a safetensors file piece by piece; returns the bytes of its tensors."""
    order = sorted(shapes, key=lambda name: (list(SAFETENSORS).index(shapes[name][0]), name))
    header, end = {}, 0
    for name in order:
        dtype, shape = shapes[name]
        begin, end = end, end + int(np.prod(shape)) * SAFETENSORS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.writelines(noise.pieces(name, *shapes[name]))
    return end


def _layer(prefix: str, dense: bool) -> Shapes:
    shapes: Shapes = {f"{prefix}self_attn.{name}.weight": ("BF16", shape) for name, shape in ATTENTION.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = ("BF16", (HIDDEN,))
    if dense:
        return shapes | _mlp(f"{prefix}mlp.", DENSE_INNER)
    shapes[f"{prefix}mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    shapes |= _mlp(f"{prefix}mlp.shared_experts.", INNER)
    for expert in range(EXPERTS):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"{prefix}mlp.experts.{expert}.{projection}.weight_"
            outputs, inputs = described(name.removesuffix("weight_"))
            shapes[f"{name}packed"] = ("I32", (outputs, inputs // PER_WORD))
            shapes[f"{name}scale"] = ("BF16", (outputs, inputs // GROUP))
            shapes[f"{name}shape"] = ("I32", (2,))
    return shapes


def _mlp(prefix: str, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": ("BF16", (inner, HIDDEN)),
        f"{prefix}up_proj.weight": ("BF16", (inner, HIDDEN)),
        f"{prefix}down_proj.weight": ("BF16", (HIDDEN, inner)),
    }


def _ends(vocabulary: int) -> Shapes:
    return {
        "language_model.model.embed_tokens.weight": ("BF16", (vocabulary, HIDDEN)),
        "language_model.model.norm.weight": ("BF16", (HIDDEN,)),
        "language_model.lm_head.weight": ("BF16", (vocabulary, HIDDEN)),
    }


def _projector() -> Shapes:
    shapes: Shapes = {f"mm_projector.pre_norm.{kind}": ("BF16", (1152,)) for kind in ("weight", "bias")}
    for layer, outputs in ((0, 4608), (2, HIDDEN)):
        shapes[f"mm_projector.proj.{layer}.weight"] = ("BF16", (outputs, 4608))
        shapes[f"mm_projector.proj.{layer}.bias"] = ("BF16", (outputs,))
    return shapes


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
