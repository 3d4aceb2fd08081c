"""Rewrites SmolLM2-135M-Instruct in Kimi's form, multi-head latent attention and routed experts, without training.

What comes out is a published checkpoint as Kimi's are (names, shards, wrapper, config), and it says what SmolLM2 says,
so that the whole path runs on real language, with SmolLM2's own tokenizer and drafter. Why it is exact:

- **Latents.** The input norm's weight is moved into Wq, Wk and Wv and becomes ones. A normalised row x̂ has a mean
  square of 1, and so has R x̂ for an orthogonal R of full width; the latent's own norm then changes nothing. Values come
  back as (Wv Rᵀ)(R x̂), and queries likewise from another latent. What is left is the two norms' eps: x̂'s mean square
  falls short of 1 by eps over the mean square of the residual stream, which the latent's norm takes back: up to 0.07 %
  in SmolLM2's first layer, whose embeddings are small, and below 0.0003 % after it.
- **Keys.** All keys are rotated, so they make up the shared rotated key: those of all K/V heads side by side, with the
  rotation frequencies repeated. A query is zero outside the key of its own K/V head. The part without rotation is zero.
  The softmax scale follows from the wider head, and queries are multiplied by what it lost.
- **Experts.** SwiGLU adds up its inner units, so they may be computed apart: one half is the shared expert, the other
  is copied into every routed expert. The chosen experts' weights add up to `routed_scaling_factor`, which is divided
  out of their down projections. The first layer stays dense.
- **Zeros.** Heads are padded to a multiple of eight with heads whose values and outputs are zero, and experts with
  units whose weights are zero, so that eight devices split both, whole groups of quantised weights included.

Copied experts and a zero part hide what `--perturbed` shows: experts that differ, and keys that are not all rotated.
That variant talks nonsense, and is there to be compared with another implementation.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from safetensors.numpy import save_file

from jaxspec.model.checkpoint.safetensors_source import CONFIG, INDEX
from jaxspec.model.checkpoint.source import Source
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.families.config import ModelConfig, read_model_config
from jaxspec.model.quantization.config import SCHEMES, QuantizationConfig, read_quantization
from jaxspec.model.quantization.scheme import UNQUANTISED, Scheme
from jaxspec.serve.cli.demo_model import packaged_gguf
from jaxspec.serve.cli.startup import bad_input
from jaxspec.sharding.arithmetic import cdiv

DEVICES = 8  # That heads, experts and their quantised groups are to be split over.
EXPERTS, CHOSEN = 8, 2
SCALING = 2.827  # Kimi K2's routed_scaling_factor.
PREFIX = "language_model."
PLAIN = "plain"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Form:
    """How the rewritten model is written.

    Attributes:
      quantised: "plain", "int4" (routed experts) or "fp8" (all Linear layers).
      dtype: of everything else, "float32" or "bfloat16".
      dequantised: write quantised weights as the numbers that they stand for.
      perturbed: make experts differ and fill the part of the keys that is not rotated.
    """

    quantised: str = PLAIN
    dtype: str = "float32"
    dequantised: bool = False
    perturbed: bool = False

    @property
    def scheme(self) -> Scheme:
        """Of the weights that are quantised."""
        return UNQUANTISED if self.quantised == PLAIN else SCHEMES[self.quantised]

    @property
    def quantization(self) -> QuantizationConfig:
        """Which Linear layers those are."""
        return read_quantization({"quantization_config": self.scheme.section})


@dataclass(frozen=True)
class Sizes:
    """The rewritten model's sizes, from those of the source."""

    heads: int
    latent: int
    rotated: int
    plain: int
    value: int
    inner: int

    @classmethod
    def of(cls, config: ModelConfig, scheme: Scheme) -> "Sizes":
        """Heads and half an MLP are rounded up, so that `DEVICES` split them in whole groups."""
        return cls(
            heads=_round_up(config.num_attention_heads, DEVICES),
            latent=config.hidden_size,
            rotated=config.num_key_value_heads * config.head_dim,
            plain=config.head_dim,
            value=config.head_dim,
            inner=_round_up(cdiv(config.intermediate_size, 2), DEVICES * scheme.unit),
        )


def main(
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    quantised: Annotated[str, typer.Option(help="plain, int4 (routed experts) or fp8 (all Linear layers).")] = PLAIN,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of what is not quantised.")] = "float32",
    dequantised: Annotated[
        bool, typer.Option("--dequantised", help="Write the numbers that the quantised weights stand for.")
    ] = False,
    perturbed: Annotated[
        bool, typer.Option("--perturbed", help="Experts that differ, keys that are not all rotated; talks nonsense.")
    ] = False,
    source: Annotated[Path | None, typer.Option(help="A Llama model; by default the packaged SmolLM2.")] = None,
) -> None:
    """Rewrite SmolLM2-135M-Instruct, exactly, as a published checkpoint in Kimi's form."""
    with bad_input():
        for option, found, known in (("--quantised", quantised, (PLAIN, *SCHEMES)), ("--dtype", dtype, DTYPES)):
            if found not in known:
                raise ValueError(f"{option}: found {found!r}, expected one of {', '.join(known)}")
        if output.exists():
            raise ValueError(f"{output}: already exists; choose another output")
        form = Form(quantised, dtype, dequantised, perturbed)
        size = write_kimi_demo(open_source(source or packaged_gguf()), output, form)
    print(f"{output}: {size / 1e6:,.0f} MB of weights")


def write_kimi_demo(source: Source, folder: Path, form: Form) -> int:
    """Writes `source`, a Llama target, in Kimi's form into the new `folder`; returns the bytes of its weights.

    Raises:
      ValueError: if the source is of another family, or of sizes that the form does not allow.
    """
    config = read_model_config(source.config)
    if config.family != "llama" or config.rope.kind != "default":
        raise ValueError(f"{source.path}: found {config.family} with {config.rope.kind} RoPE, expected a plain Llama")
    scheme = form.scheme
    if scheme.whole_units and config.hidden_size % scheme.unit:
        raise ValueError(f"{source.path} hidden_size: found {config.hidden_size}, expected groups of {scheme.unit}")
    sizes = Sizes.of(config, scheme)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(_config(config, sizes, source.config, form), indent=2) + "\n")
    source.write_tokenizer(folder)
    shards = config.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for name, weight in _layer(source, config, sizes, form, number) if number + 1 < shards else _ends(source):
            tensors |= {PREFIX + key: np.ascontiguousarray(array) for key, array in _stored(name, weight, form)}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _config(config: ModelConfig, sizes: Sizes, raw: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The wrapper's `config.json`, as Kimi K2.5 has it."""
    frequencies = np.tile(config.rope.inverse_frequencies(config.head_dim), config.num_key_value_heads)
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": sizes.inner,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.latent,
        "kv_lora_rank": sizes.latent,
        "qk_nope_head_dim": sizes.plain,
        "qk_rope_head_dim": sizes.rotated,
        "v_head_dim": sizes.value,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": CHOSEN,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": SCALING,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": {"rope_type": "default", "inv_freq": frequencies.tolist()},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "dtype": form.dtype,
    }
    text |= {key: raw[key] for key in ("bos_token_id", "eos_token_id") if key in raw}
    if form.scheme != UNQUANTISED and not form.dequantised:
        text["quantization_config"] = dict(form.scheme.section)
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "tie_word_embeddings": False,
        "dtype": form.dtype,
    }


def _layer(
    source: Source, config: ModelConfig, sizes: Sizes, form: Form, layer: int
) -> Iterator[tuple[str, np.ndarray]]:
    """One decoder layer's weights in Kimi's form, float64."""
    prefix = f"model.layers.{layer}."
    rng = np.random.default_rng(layer)

    def read(name: str) -> np.ndarray:
        return source.read(f"{prefix}{name}.weight").astype(np.float64)

    weights = _attention(read, config, sizes, form, rng)
    gate, up, down = (read(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
    if layer == 0:
        weights |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    else:
        weights |= _experts(gate, up, down, sizes, form, rng)
    for name, weight in weights.items():
        yield prefix + name + ("" if name.endswith("bias") else ".weight"), weight


def _attention(
    read: Any, config: ModelConfig, sizes: Sizes, form: Form, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    heads, groups, width, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    norm = read("input_layernorm")
    query, key, value = ((read(f"self_attn.{name}_proj") * norm).reshape(-1, width, hidden) for name in ("q", "k", "v"))
    # Where the shared rotated key holds row j of K/V head g: pair by pair, the two rows of a pair side by side.
    row = np.arange(width)
    places = 2 * (np.arange(groups)[:, None] * (width // 2) + row % (width // 2)) + row // (width // 2)
    owner = np.arange(heads) // (heads // groups)  # Each query head's K/V head.
    q_latent, kv_latent = (np.linalg.qr(rng.standard_normal((hidden, hidden)))[0] for _ in range(2))
    rotated = np.zeros((sizes.rotated, hidden))
    rotated[places] = key
    queries = np.zeros((sizes.heads, sizes.plain + sizes.rotated, hidden))
    for head in range(heads):
        queries[head, sizes.plain + places[owner[head]]] = query[head]
    keys_values = np.zeros((sizes.heads, sizes.plain + sizes.value, hidden))
    keys_values[:heads, sizes.plain :] = value[owner]
    if form.perturbed:
        queries[:heads, : sizes.plain] = rng.standard_normal((heads, sizes.plain, hidden)) / np.sqrt(hidden)
        keys_values[:heads, : sizes.plain] = rng.standard_normal((heads, sizes.plain, hidden)) / np.sqrt(hidden)
    queries *= np.sqrt((sizes.plain + sizes.rotated) / width)
    outputs = np.zeros((hidden, sizes.heads * sizes.value))
    outputs[:, : heads * width] = read("self_attn.o_proj")
    return {
        "input_layernorm": np.ones(hidden),
        "post_attention_layernorm": read("post_attention_layernorm"),
        "self_attn.q_a_proj": q_latent,
        "self_attn.q_a_layernorm": np.ones(hidden),
        "self_attn.q_b_proj": queries.reshape(-1, hidden) @ q_latent.T,
        "self_attn.kv_a_proj_with_mqa": np.concatenate([kv_latent, rotated]),
        "self_attn.kv_a_layernorm": np.ones(hidden),
        "self_attn.kv_b_proj": keys_values.reshape(-1, hidden) @ kv_latent.T,
        "self_attn.o_proj": outputs,
    }


def _experts(
    gate: np.ndarray, up: np.ndarray, down: np.ndarray, sizes: Sizes, form: Form, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The MLP's first half as the shared expert, its second as every routed one, both padded with zeros."""
    half = cdiv(gate.shape[0], 2)

    def padded(weight: np.ndarray, axis: int) -> np.ndarray:
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, sizes.inner - weight.shape[axis])
        return np.pad(weight, widths)

    shared = {"gate_proj": gate[:half], "up_proj": up[:half], "down_proj": down[:, :half]}
    routed = {"gate_proj": gate[half:], "up_proj": up[half:], "down_proj": down[:, half:] / SCALING}
    weights = {
        "mlp.gate": rng.standard_normal((EXPERTS, gate.shape[1])) / np.sqrt(gate.shape[1]),
        "mlp.gate.e_score_correction_bias": rng.standard_normal(EXPERTS) / 20,
    }
    for name, weight in shared.items():
        weights[f"mlp.shared_experts.{name}"] = padded(weight, name == "down_proj")
    for expert in range(EXPERTS):
        for name, weight in routed.items():
            noise = rng.standard_normal(weight.shape) * weight.std() if form.perturbed else 0
            weights[f"mlp.experts.{expert}.{name}"] = padded(weight + noise, name == "down_proj")
    return weights


def _ends(source: Source) -> Iterator[tuple[str, np.ndarray]]:
    """What lies outside the layers; a head of its own, even where the source's is tied."""
    embedding = source.read("model.embed_tokens.weight")
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", source.read("model.norm.weight")
    yield "lm_head.weight", source.read("lm_head.weight") if "lm_head.weight" in source.tensors else embedding


def _stored(name: str, weight: np.ndarray, form: Form) -> Iterator[tuple[str, np.ndarray]]:
    """A weight as the tensors that the form writes for it."""
    dtype = DTYPES[form.dtype]
    linear = weight.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")
    if name.endswith("bias"):
        yield name, weight.astype(np.float32)
    elif linear and form.quantization.quantizes(module := name.removesuffix(".weight")):
        tensors = form.scheme.quantise(weight)
        if form.dequantised:
            yield name, form.scheme.dequantise(tensors, dtype)
            return
        for part, array in tensors.items():
            yield f"{module}.{part}", array
    else:
        yield name, weight.astype(dtype)


def _round_up(number: int, multiple: int) -> int:
    return cdiv(number, multiple) * multiple


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
