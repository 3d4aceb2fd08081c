"""The sizes of published models, and of one device's share of them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxspec.model.families.config import DFlashConfig, ModelConfig, default_target_layers
from jaxspec.model.families.kimi_config import KimiConfig
from jaxspec.model.families.new_drafter import drafter_for
from jaxspec.model.families.registry import FAMILIES
from jaxspec.model.layers.rope import RopeConfig
from jaxspec.model.quantization.config import QuantizationConfig
from jaxspec.model.quantization.int4 import INT4
from jaxspec.sharding.layout import Layout

# What a mesh cuts: a config's field, and the axis of the layout that it counts.
_CUTS = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "mlp",
    "moe_intermediate_size": "expert_mlp",
    "vocab_size": "vocab",
}


@dataclass(frozen=True)
class ModelPair:
    """A target and the DFlash drafter made for it."""

    target: ModelConfig | KimiConfig
    drafter: DFlashConfig

    def share(self, devices: int) -> "ModelPair":
        """One device's part of both models as models of their own, for timing a device without its mesh.

        Raises:
          ValueError: naming the axis, where the mesh would not split all that it can.
        """

        def cut(config: Any, layout: Layout) -> Any:
            if whole := layout.replicated():
                raise ValueError(f"--shard: found {devices}, which does not divide the {whole[0]}")
            fields = {name: axis for name, axis in _CUTS.items() if hasattr(config, name)}
            return dataclasses.replace(
                config, **{name: getattr(config, name) // layout.shares(axis) for name, axis in fields.items()}
            )

        target = cut(self.target, FAMILIES[self.target.family].layout_of(self.target, devices))
        drafter = cut(self.drafter, FAMILIES["dflash"].layout_of(self.drafter, devices))
        drafter = dataclasses.replace(drafter, vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1)
        return ModelPair(target, drafter)

    def with_drafter(self, layers: int, block_size: int) -> "ModelPair":
        """The same target with a drafter of another depth or block; the taps follow the published rule.

        Raises:
          ValueError: naming the value, where no such drafter can be.
        """
        most = self.target.num_hidden_layers - 3
        if not 1 <= layers <= most:
            raise ValueError(f"drafter layers: found {layers}, expected 1 to {most}")
        if not 2 <= block_size <= 256:
            raise ValueError(f"block size: found {block_size}, expected 2 to 256")
        drafter = dataclasses.replace(
            self.drafter,
            num_hidden_layers=layers,
            block_size=block_size,
            target_layer_ids=default_target_layers(self.target.num_hidden_layers, layers),
            windows=(0,) * layers,
            causal=(False,) * layers,
        )
        return ModelPair(self.target, drafter)


def pair_of(target: ModelConfig, layers: int, block_size: int) -> ModelPair:
    """A target and a drafter of the target's own width, heads and MLP, which taps a layer for each of its own."""
    mask_token_id = target.vocab_size - 1
    drafter = drafter_for(target, layers=layers, taps=layers, block_size=block_size, mask_token_id=mask_token_id)
    return ModelPair(target, drafter)


_KIMI_ROPE = RopeConfig(50000.0, "yarn", 64.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)

SHAPES: dict[str, ModelPair] = {
    "smollm2": pair_of(
        ModelConfig(
            family="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=1e5),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            qk_norm=False,
        ),
        layers=4,
        block_size=8,
    ),
    "qwen3-8b": pair_of(
        ModelConfig(
            family="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e6),
            max_position_embeddings=40960,
            tie_word_embeddings=False,
            qk_norm=True,
        ),
        layers=5,
        block_size=16,
    ),
    "kimi-k2.6": ModelPair(
        KimiConfig(
            family="kimi",
            vocab_size=163840,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=384,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.827,
            rms_norm_eps=1e-5,
            rope=_KIMI_ROPE,
            max_position_embeddings=262144,
            tie_word_embeddings=False,
            quantization=QuantizationConfig(INT4),
        ),
        DFlashConfig(
            vocab_size=163840,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=6,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope=_KIMI_ROPE,
            max_position_embeddings=262144,
            block_size=8,
            mask_token_id=163838,
            num_target_layers=61,
            target_layer_ids=(1, 12, 24, 35, 47, 58),
            windows=(0,) * 6,
            causal=(False,) * 6,
        ),
    ),
}
