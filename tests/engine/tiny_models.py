"""Tiny random models of real architectures, built from their configurations: nothing is downloaded.

`SUPPORTED` run through block tables, `REFUSED` must be refused at load. Windows and chunks are shorter than the prompts
of the tests, so that they matter; weights are drawn wide enough that attention is far from uniform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 128
WINDOW = 11
MAX_MODEL_LEN = 96

# What most configurations share: 4 query heads on 2 KV heads, 16 wide.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_MODEL_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": 8,  # here the width of the rotated part
}
_SLIDING_FULL = ["sliding_attention", "full_attention"]

# name → (configuration class, its arguments)
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biased": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "mistral-sliding": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", _EXPERTS),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3-text": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL}),
    "phi": ("PhiConfig", {}),
    "phi3-sliding": ("Phi3Config", {"sliding_window": WINDOW}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt2-scaled-by-layer": ("GPT2Config", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "codegen": ("CodeGenConfig", {**_GPT2, "rotary_dim": 8}),
    "gpt-bigcode": ("GPTBigCodeConfig", _GPT2),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-oss-sinks": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    ),
    "deepseek-v3-latent": (
        "DeepseekV3Config",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "exaone4": ("Exaone4Config", {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL}),
    "ernie4.5": ("Ernie4_5Config", {}),
    "persimmon": ("PersimmonConfig", {}),
    "llama4-chunked": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "moe_layers": [1],
        },
    ),
}

# Those of SUPPORTED that run in our own code too.
NATIVE = ("llama", "llama-biased", "llama3-rope", "mistral-sliding", "qwen2", "qwen2-sliding", "qwen3")

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", _FALCON),
    "falcon-alibi": ("FalconConfig", {**_FALCON, "alibi": True}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 96}),
    "gpt-neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "recurrent-gemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 64}),
    "qwen3-next": ("Qwen3NextConfig", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "t5": ("T5Config", {"d_kv": 16, "d_ff": 96}),
    "llama-dynamic-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "llama4-temperature": ("Llama4TextConfig", {"no_rope_layers": [1, 0], "attn_temperature_tuning": True}),
}

# Their configurations have other names for the same things, and are given in full above.
_OWN_NAMES = (
    "GPT2Config",
    "GPTJConfig",
    "CodeGenConfig",
    "GPTBigCodeConfig",
    "MptConfig",
    "FalconConfig",
    "BloomConfig",
)


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """The tiny model, built once: for those who do not change it."""
    return tiny_model(name)


def tiny_model(name: str) -> PreTrainedModel:
    """A fresh random model of an architecture in `SUPPORTED` or `REFUSED`, float32, the same at each call."""
    config_class, arguments = {**SUPPORTED, **REFUSED}[name]
    common = {} if config_class in _OWN_NAMES else _COMMON
    config = getattr(transformers, config_class)(**{**common, **arguments})
    build: Callable[..., PreTrainedModel] = transformers.AutoModelForCausalLM.from_config
    if config.is_encoder_decoder:
        build = transformers.AutoModelForSeq2SeqLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        # Eager: the model's own formula is the truth of the tests.
        model = build(config, dtype=torch.float32, attn_implementation="eager")
        for parameter_name, parameter in model.named_parameters():
            # Left at zero by the constructors, and then without effect: biases and sinks.
            if parameter_name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()
