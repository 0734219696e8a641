"""Digests of everything besides tokens that KV depends on: model, kernels, request."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any, Final

from kvwire.errors import UsageError
from kvwire_store.conventions import meaning_of, require_known
from kvwire_store.weights import weights_name
from kvwire_vllm.caches import layer_specs

WHOLE_TOKENS: Final = "whole tokens"


def tokens_say_all(request: Any) -> bool:
    """Return whether tokens identify a prompt; they do not identify embeddings."""
    embeddings = getattr(request, "prompt_embeds", None)
    return bool(request.prompt_token_ids) and embeddings is None


def identity_of(request: Any) -> bytes:
    """Return a digest of everything besides tokens that a request's KV depends on.

    If KV depends on tokens alone, the digest is empty, and other programs can compute
    the names of the blocks.
    """
    adapter = getattr(request, "lora_request", None)
    names = [getattr(adapter, "lora_name", ""), getattr(request, "cache_salt", None)]
    if adapter is not None:
        names.append(_adapter_weights(adapter.lora_path))
    for feature in getattr(request, "mm_features", None) or ():
        # A client may write placeholder tokens itself, so the tokens do not determine
        # where a picture is.
        place = getattr(getattr(feature, "mm_position", None), "offset", None)
        names += [getattr(feature, "identifier", None), str(place)]
    # As JSON, so that no two lists of names look the same: clients choose some of them.
    return json.dumps(names).encode() if any(names) else b""


def model_digest(vllm_config: Any) -> str:
    """Return a digest of a model's architecture, wherever its files are."""
    model = vllm_config.model_config
    facts = {
        **_facts(model.hf_config.to_dict()),
        "quantization": str(model.quantization),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _facts(value: Any) -> Any:
    """Return a part of a config without fields that depend on where the files are."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in _OF_THE_FILES}
        return {key: _facts(one) for key, one in kept.items()}
    return [_facts(one) for one in value] if isinstance(value, list) else value


def model_weights(vllm_config: Any, fingerprint: str) -> str:
    """Return the weights' name: the operator's fingerprint, or one from the files."""
    return fingerprint or _weights(vllm_config.model_config, vllm_config.load_config)


def model_name(vllm_config: Any, fingerprint: str) -> str:
    """Return a name for model and weights, the same on engines that may share KV."""
    text = json.dumps(
        [
            model_digest(vllm_config),
            model_weights(vllm_config, fingerprint),
            draft_name(vllm_config, fingerprint),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def portable_name(vllm_config: Any, fingerprint: str) -> str:
    """Return a name for weights and KV that other engines form as well.

    Raises:
        UsageError: It is not known what this model's KV means to other engines.
    """
    where = "kv_connector_extra_config: portable"
    model = vllm_config.model_config
    config = model.hf_text_config
    rotation = getattr(config, "rope_parameters", None)
    meaning = meaning_of(config, rotation, getattr(config, "rope_theta", None))
    require_known(where, "vllm", meaning)
    for what, value, plain in (
        ("quantization", model.quantization, (None,)),
        ("kv_cache_dtype", vllm_config.cache_config.cache_dtype, ("auto",)),
        ("a draft model", draft_name(vllm_config, fingerprint), ("none",)),
        ("ranks", vllm_config.parallel_config.tensor_parallel_size, (1,)),
    ):
        if value not in plain:
            raise UsageError(
                f"{where}: {what} is {value}; only {plain[0]} is known to other engines"
            )
    return meaning.named(model_weights(vllm_config, fingerprint), "vllm")


def draft_name(vllm_config: Any, fingerprint: str) -> str:
    """Return a name for the draft model, which also has caches; "none" without one."""
    speculative = getattr(vllm_config, "speculative_config", None)
    model = getattr(speculative, "draft_model_config", None)
    # The n-gram method looks up the prompt in itself, so its draft model is the target.
    if (
        speculative is None
        or model is None
        or model is getattr(speculative, "target_model_config", None)
    ):
        return "none"
    name = f"{speculative.method} of {' '.join(model.architectures)}"
    if fingerprint:
        return name  # the fingerprint covers all weights
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return f"{name}, {_weights(model, load)}"


def _weights(model: Any, load: Any) -> str:
    """Return a name for the weights of one of an engine's models."""
    if load.load_format == "dummy":
        return f"dummy weights of seed {model.seed}"
    # If weights are streamed from elsewhere, `model` contains the config only.
    where = getattr(model, "model_weights", "") or model.model
    try:
        return weights_name(
            where, revision=model.revision or "main", cache=load.download_dir or ""
        )
    except UsageError as exc:
        raise UsageError(
            f"{exc}; without the weights, kvwire cannot detect an engine with other "
            'weights: set "fingerprint" in kv_connector_extra_config to a text that '
            "names the weights, the same on all engines that share KV"
        ) from None


def _adapter_weights(path: str) -> str:
    """Return a name for an adapter's weights; its path if the files are not here."""
    try:
        return weights_name(path)
    except UsageError:
        return path


def block_order(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return a description of the kernels' block layout, which engines must share.

    A tensor's shape does not show it. Some kernels store all keys of a block before all
    values, or use the token as the keys' last axis. Only a kernel of the same kind and
    block size can use such blocks.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for _, name, spec in layer_specs(kv_cache_config):
        if hasattr(spec, "shapes"):
            continue  # recurrent states are moved whole
        get_backend = getattr(layers.get(name), "get_attn_backend", None)
        module = get_backend().__module__ if get_backend else "unknown"
        kernel = module.rpartition(".")[2]
        if kernel in _WHOLE_TOKENS:
            found.add(WHOLE_TOKENS)
            continue
        isa_of = getattr(sys.modules.get(module), "_get_attn_isa", None)
        if isa_of is not None:
            dtype = vllm_config.model_config.dtype
            kernel += f" {isa_of(dtype, spec.block_size, spec.head_size)}"
        found.add(f"{kernel} with blocks of {spec.block_size}")
    return "; ".join(sorted(found))


# Modules of vLLM's backends (class names are not unique). Their code was read: they
# store a token's keys and values together in a block.
_WHOLE_TOKENS: Final = {
    "flash_attn",
    "flashinfer",
    "flex_attention",
    "triton_attn",
    "cpu_mla",
    "cutlass_mla",
    "flashattn_mla",
    "flashinfer_mla",
    "flashmla",
    "triton_mla",
}

# Fields of a model's config that describe where it came from.
_OF_THE_FILES = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
}
