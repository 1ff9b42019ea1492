"""The published config.json of each shipped model, as far as it shapes the model."""

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_5_7b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=152064, hidden_size=3584,
        intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1000000.0, hidden_act="silu",
        sliding_window=131072, use_sliding_window=False, max_window_layers=28, tie_word_embeddings=False,
        torch_dtype="bfloat16",
    ),
    "qwen2_5_14b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=152064, hidden_size=5120,
        intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1000000.0, hidden_act="silu",
        sliding_window=131072, use_sliding_window=False, max_window_layers=48, tie_word_embeddings=False,
        torch_dtype="bfloat16",
    ),
    "qwen3_14b": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, hidden_size=5120,
        intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000,
        hidden_act="silu", attention_bias=False, sliding_window=None, use_sliding_window=False,
        max_window_layers=40, rope_scaling=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    ),
    "r1_distill_llama_8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu",
        attention_bias=False, mlp_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        rope_scaling=dict(
            factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    "mistral_7b_instruct": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", vocab_size=32000, hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000.0, hidden_act="silu",
        sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    ),
}  # fmt: skip

# From the total_size of each model.safetensors.index.json, 2 bytes a parameter.
PARAMETERS = {
    "qwen2_5_7b": 15_231_233_024 // 2,
    "qwen2_5_14b": 29_540_067_328 // 2,
    "qwen3_14b": 29_536_614_400 // 2,
    "r1_distill_llama_8b": 16_060_522_496 // 2,
    "mistral_7b_instruct": 14_483_464_192 // 2,
}
