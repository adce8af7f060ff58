"""Tiny configurations of the model files that `fixtures/model_zoo.json` leaves out."""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "max_position_embeddings": 1000,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 12,
    "v_head_dim": 16,
}
_HYBRID = ["sliding_attention", "full_attention"] * 2
_ROPES = {kind: {"rope_theta": 10000.0} for kind in set(_HYBRID)}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 16}
_KDA = {
    "linear_attn_config": {
        "head_dim": 16,
        "kda_layers": [1, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
}

MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_PLAIN,
        **_MOE,
        **_LATENT,
        "head_dim": 28,
        "layer_group_size": 2,
        "group_norm_size": 1,
    },
    "bailing_moe_v3": {
        **_PLAIN,
        **_MOE,
        **_LATENT,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "deepseek_v41": {
        **_PLAIN,
        **_MOE,
        "head_dim": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 12,
        "compress_ratios": [0, 0, 0, 0],
        "index_topk": 8,
        **_INDEXER,
    },
    "gear": {
        **_PLAIN,
        "layer_types": _HYBRID,
        "sliding_window": 12,
        "attn_logit_softcapping": 20.0,
    },
    "gemma3": {
        "text_config": {
            **_PLAIN,
            "model_type": "gemma3_text",
            "sliding_window": 12,
            "sliding_window_pattern": 2,
        },
    },
    "glm_moe_dsa": {
        **_PLAIN,
        **_MOE,
        **_LATENT,
        **_INDEXER,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gptj": {"n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_layer": 3, "vocab_size": 100},
    "kimi_k25": {
        "text_config": {**_PLAIN, **_MOE, **_LATENT, "model_type": "kimi_k2"},
    },
    "kimi_k3": {
        "text_config": {
            **_PLAIN,
            **_LATENT,
            **_KDA,
            "model_type": "kimi_linear",
            "hidden_act": "situ",
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "routed_expert_hidden_size": 32,
            "attn_res_block_size": 2,
        },
    },
    "mellum": {
        **_PLAIN,
        **_MOE,
        "layer_types": _HYBRID,
        "sliding_window": 12,
        "rope_parameters": _ROPES,
    },
    "minicpm3": {
        **_PLAIN,
        **_LATENT,
        "num_key_value_heads": 4,
        "dim_model_base": 64,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 6,
            "short_factor": [1.0] * 6,
            "original_max_position_embeddings": 1000,
        },
    },
    "minimax_m3_vl": {
        "text_config": {
            **_PLAIN,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 3,
        },
    },
    "ministral3": {
        **_PLAIN,
        "layer_types": _HYBRID,
        "sliding_window": 12,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral3": {"text_config": {**_PLAIN, "model_type": "llama"}},
    "mistral4": {
        **_PLAIN,
        **_MOE,
        **_LATENT,
        "head_dim": None,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "muse_glimmer": {**_PLAIN, "layer_types": _HYBRID, "sliding_window": 12},
    "muse_spark": {
        "text_config": {
            **_PLAIN,
            "post_norm_eps": 1e-6,
            "layer_types": _HYBRID,
            "layer_rope_theta": [10000.0, 0, 10000.0, 0],
            "rope_parameters": {"rope_theta": 10000.0},
            "sliding_window": 12,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 32,
        },
    },
    "nanbeige": {**_PLAIN, "num_loops": 2},
    "olmo_hybrid": {
        **_PLAIN,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
    },
    "phixtral": {
        "num_vocab": 100,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 3,
        "rotary_dim": 8,
    },
    "plamo2": {
        **_PLAIN,
        "hidden_size_per_head": 16,
        "attention_window_size": 1000,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
    },
    "plamo3": {**_PLAIN, "window_size": 12, "sliding_window_pattern": 2},
    "qwen2_vl": {"text_config": {**_PLAIN, "model_type": "qwen2"}},
    "solar_open": {**_PLAIN, **_MOE, "partial_rotary_factor": 0.5},
    "spark2_5": {
        **_PLAIN,
        "layer_types": _HYBRID,
        "sliding_window": 12,
        "rope_parameters": _ROPES,
    },
    "talkie": {**_PLAIN, "num_key_value_heads": 4},
}
