"""Small models with random weights that are large enough to matter.

vLLM's own dummy weights are so small that the KV of a prompt hardly changes what is
generated: a connector that moved nothing would pass. With these, another first token
gives another answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
EOS_TOKEN = 2

# What all models have; "gqa" has nothing else.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN,
}
LLAMA = ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": False})
_BY_LAYER = ["sliding_attention", "full_attention"] * 2


def _windows(of_each: int, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """Layers with a window before each one that sees everything."""
    layers = 2 * [*["sliding_attention"] * of_each, "full_attention"]
    shape = {"num_hidden_layers": len(layers), "layer_types": layers, **more}
    shape |= {"sliding_window": 256, "query_pre_attn_scalar": 32}
    return "Gemma3ForCausalLM", "Gemma3TextConfig", shape


# The classes of transformers for a model and its config, and what that has beside the
# common fields; None takes one of those away.
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gqa": LLAMA,
    # Beside "gqa" as its draft model: other heads.
    "draft": (*LLAMA[:2], LLAMA[2] | {"num_key_value_heads": 4, "head_dim": 64}),
    "mha": (*LLAMA[:2], LLAMA[2] | {"num_key_value_heads": 4}),
    "window": _windows(1, num_key_value_heads=1),
    "gemma": _windows(2),
    # As Gemma 4: layers with a window have fewer and smaller heads than the others.
    "by layer": (
        *("Gemma4ForCausalLM", "Gemma4TextConfig"),
        {
            "sliding_window": 256,
            "layer_types": _BY_LAYER,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "per_layer_config": {
                layer: {"head_dim": 64, "num_key_value_heads": 4}
                for layer, one in enumerate(_BY_LAYER)
                if one == "full_attention"
            },
        },
    ),
    # As Llama 4: layers that see a chunk of the prompt, and layers that see everything.
    "chunks": (
        *("Llama4ForCausalLM", "Llama4TextConfig"),
        {
            "hidden_size": 128,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 256,
            "no_rope_layers": [1, 0] * 2,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "num_local_experts": 2,
            "use_qk_norm": False,
            "pad_token_id": 0,
        },
    ),
    # As LFM2: short convolutions, whose states are none of tokens, and attention.
    "conv": (
        *("Lfm2ForCausalLM", "Lfm2Config"),
        {
            "hidden_size": 128,
            "head_dim": None,
            "layer_types": ["conv", "full_attention"] * 2,
            # vLLM reads these, and transformers has no defaults for them.
            **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 128),
        },
    ),
    # As Granite 4: Mamba 2 and attention.
    "mamba": (
        *("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"),
        {
            "hidden_size": 128,
            "head_dim": None,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
    ),
    # One latent of 512 + 64 for all heads: the only size vLLM computes on CPUs.
    "mla": (
        *("DeepseekV2ForCausalLM", "DeepseekV2Config"),
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 4,  # of 4 layers, so no experts
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
        },
    ),
}

# A chat's tokens are those of its words.
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"


def make_model(kind: str, folder: Path, *, seed: int = 5, **sizes: int) -> Path:
    """Write a model and a tokenizer whose words are ``w0``, ``w1``, ...

    Of another seed it is a tune: its config is the same, and its weights are others.
    """
    import torch
    import transformers

    path = folder / kind.replace(" ", "-")
    torch.manual_seed(seed)
    model, config, shape = SHAPES[kind]
    fields = {**COMMON, **shape, **sizes}
    absent = {name for name in COMMON if fields[name] is None}
    fields = {name: fields[name] for name in fields.keys() - absent}
    made = getattr(transformers, model)(getattr(transformers, config)(**fields))
    made.to(torch.float32).save_pretrained(path)
    write_word_tokenizer(path)
    return path


def write_word_tokenizer(path: Path) -> None:
    """Give a model a tokenizer whose words are ``w0``, ``w1``, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        chat_template=TEMPLATE,
    ).save_pretrained(path)


def write_byte_tokenizer(path: Path) -> None:
    """Give a model a tokenizer whose tokens are bytes, and pairs of them.

    Random tokens are halves of characters then, as they are not with words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    common = [one for one in "etaoinshrdlu" if one in letters]
    merges = [(one, other) for one in common for other in letters[64:96]]
    merges = merges[: VOCABULARY - len(special) - len(letters)]
    words = [*special, *letters, *(one + other for one, other in merges)]
    tokens = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(tokens, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[EOS_TOKEN],
        chat_template=TEMPLATE,
    ).save_pretrained(path)


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter (LoRA) of "gqa", large enough to matter."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors = {}
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    for layer in range(4):
        for name, size in sizes.items():
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{of}.lora_A.weight"] = torch.randn(8, 64)
            tensors[f"{of}.lora_B.weight"] = torch.randn(size, 8)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    said |= {"target_modules": [*sizes], "base_model_name_or_path": "m"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
