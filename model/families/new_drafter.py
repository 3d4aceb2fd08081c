"""The shape of a new drafter, as one is trained or timed for a target."""

from jaxspec.model.families.config import DFlashConfig, ModelConfig, RopeConfig, default_target_layers


def drafter_for(
    target: ModelConfig,
    *,
    layers: int,
    taps: int,
    block_size: int,
    mask_token_id: int,
    intermediate_size: int | None = None,
) -> DFlashConfig:
    """A drafter of full-attention layers with the target's own width and heads.

    Args:
      taps: target layers that it reads, chosen by the published rule.
      intermediate_size: width of its MLP; None takes the target's.
    """
    return DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(target.rope.theta),
        max_position_embeddings=target.max_position_embeddings,
        block_size=block_size,
        mask_token_id=mask_token_id,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=default_target_layers(target.num_hidden_layers, taps),
        windows=(0,) * layers,
        causal=(False,) * layers,
    )
