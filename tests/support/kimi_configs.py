"""The published configs of Kimi K2.6 and of its drafter."""

from scripts import make_synthetic_checkpoint

TEXT = {
    **make_synthetic_checkpoint.TEXT,
    "num_hidden_layers": 61,
    "vocab_size": 163840,
    "eos_token_id": 163586,
    "dtype": "bfloat16",
}
K26 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": {"vt_num_hidden_layers": 27},
}
K26_DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": TEXT["rope_scaling"],
    "max_position_embeddings": 262144,
    "num_target_layers": 61,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    "dtype": "bfloat16",
}
