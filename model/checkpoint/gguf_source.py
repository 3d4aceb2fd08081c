"""A GGUF file (architecture `llama`) as a source: metadata as a `config.json`, tensors under Hugging Face names.

Quantised blocks are expanded by the `gguf` package, a few rows at a time.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from jaxspec.model.checkpoint.gguf_tokenizer import write_tokenizer
from jaxspec.model.checkpoint.source import SourceTensor, fingerprint
from jaxspec.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_SIZE
from jaxspec.model.families.rope_config import MAX_POSITIONS
from jaxspec.model.fields import Fields
from jaxspec.model.layers.rope import RopeConfig

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
KEPT_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GGUFSource:
    """One GGUF file, read as a source."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
            # The vocabulary, which is large, is for `write_tokenizer`.
            self._metadata = {
                key: field.contents()
                for key, field in reader.fields.items()
                if key.startswith(("general.architecture", "split.count", "llama.")) or key.endswith("s_token_id")
            }
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
            raise ValueError(f"{path}: truncated or not a GGUF file: {error}") from error
        self._stored = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        if len(self._stored) < len(reader.tensors):
            raise ValueError(f"{path}: holds a tensor twice")
        self.config: Mapping[str, Any] = self._config()
        self.tensors: Mapping[str, SourceTensor] = {
            # ggml lists the fastest dimension first.
            name: SourceTensor(
                tuple(int(n) for n in reversed(tensor.shape)), KEPT_DTYPES.get(tensor.tensor_type, "bfloat16")
            )
            for name, tensor in self._stored.items()
        }
        self.fingerprint = fingerprint([path])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See `Source.read`; always float32."""
        tensor = self._stored[name]
        rows = np.arange(self.tensors[name].shape[0])[start:stop]
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            rows = _interleaved(rows, self.config["head_dim"])
        return dequantize(np.asarray(tensor.data[rows]), tensor.tensor_type)

    def write_tokenizer(self, folder: Path) -> None:
        """See `Source.write_tokenizer`."""
        write_tokenizer(self.path, folder)

    def _config(self) -> dict[str, Any]:
        """The `config.json` that the file's metadata amount to."""
        for key, supported in (
            ("general.architecture", "llama"),
            ("split.count", 1),
            ("llama.expert_count", 0),
            ("llama.rope.scaling.type", "none"),
        ):
            if (found := self._metadata.get(key, supported)) not in (supported, 0):
                raise ValueError(f"{self.path}: metadata {key}: found {found!r}, only {supported!r} is supported")
        fields = Fields(self._metadata, f"{self.path}: metadata")
        hidden = fields.integer("llama.embedding_length", 1, MAX_SIZE)
        heads = fields.integer("llama.attention.head_count", 1, MAX_HEADS)
        head_dim = fields.integer("llama.attention.key_length", 1, MAX_HEADS, hidden // heads)
        fields.integer("llama.rope.dimension_count", head_dim, head_dim, head_dim)
        embedding = self._stored.get("model.embed_tokens.weight")
        eps = np.float32(fields.real("llama.attention.layer_norm_rms_epsilon", high=1.0))
        vocab = int(embedding.shape[-1]) if embedding else fields.integer("llama.vocab_size", 1, MAX_SIZE)
        theta = fields.real("llama.rope.freq_base", default=10000.0)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": fields.integer("llama.feed_forward_length", 1, MAX_SIZE),
            "num_hidden_layers": fields.integer("llama.block_count", 1, MAX_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.integer("llama.attention.head_count_kv", 1, MAX_HEADS, heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(str(eps)),  # The shortest decimal that is this float32: 1e-05, not 9.99…e-06.
            "rope_theta": theta,
            "max_position_embeddings": fields.integer("llama.context_length", 2, MAX_POSITIONS),
            "tie_word_embeddings": "lm_head.weight" not in self._stored,
        }
        if (scaling := self._rope_scaling(head_dim, theta)) is not None:
            config["rope_scaling"] = scaling
        for key in ("bos_token_id", "eos_token_id"):
            if f"tokenizer.ggml.{key}" in self._metadata:
                config[key] = fields.integer(f"tokenizer.ggml.{key}", 0, vocab - 1)
        return config

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        """The `rope_scaling` behind the frequency factors that Llama 3.1 and 3.2 files carry instead of it."""
        tensor = self._stored.pop(ROPE_FACTORS, None)
        if tensor is None:
            return None
        plain = RopeConfig(theta).inverse_frequencies(head_dim)
        for factor in (8.0, 32.0):  # Llama 3.1 and Llama 3.2; the other numbers are the same in both.
            scaled = RopeConfig(theta, "llama3", factor, 1.0, 4.0, 8192)
            if tensor.data.shape == plain.shape and np.allclose(
                tensor.data, plain / scaled.inverse_frequencies(head_dim), rtol=1e-4
            ):
                return {
                    "rope_type": scaled.kind,
                    "factor": scaled.factor,
                    "low_freq_factor": scaled.low_freq_factor,
                    "high_freq_factor": scaled.high_freq_factor,
                    "original_max_position_embeddings": scaled.original_max_position_embeddings,
                }
        raise ValueError(
            f"{self.path}: {ROPE_FACTORS}: found factors of neither Llama 3.1 nor Llama 3.2, not supported"
        )


class _Reader(GGUFReader):
    """A reader that slices a plain array over the mapped file: twice as fast as slicing the memmap itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is, and is then refused as unmapped."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block and block[2] in BLOCK_NAMES:
        return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}.weight"
    return TENSOR_NAMES.get(name, name)


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where GGUF keeps the Q or K rows `rows`: it stores row i of a head's first half beside row i of its second."""
    head, row = np.divmod(rows, head_dim)
    half, place = np.divmod(row, head_dim // 2)
    return head * head_dim + 2 * place + half
