"""A Llama model's directory as a GGUF file, unquantised, so that llama.cpp computes with the weights of all others.

Converted from the very tensors that the other systems load; knows nothing of who reads the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Kinds of tokens, as GGUF numbers them.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_gguf(directory: Path, path: Path, dtype_name: str) -> None:
    """Writes the model in `directory` to `path`, its matrices as "float32" or "bfloat16".

    Vectors (the norms) are stored as float32 in either case, as llama.cpp wants them, but rounded to the dtype first:
    then all systems have the same values. The vocabulary is written so that ids can be turned into text, not text into
    ids: prompts are given as ids. Raises ValueError for a model that is not a plain Llama, or has no byte-level BPE.
    """
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.models.smollm2 import quiet_progress_bars

    config = AutoConfig.from_pretrained(directory)
    rope = config.rope_parameters
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default" or config.attention_bias:
        raise ValueError(
            f"{directory} has a model of type {config.model_type!r}; converted can be: llama, without scaled rotary "
            "positions and biases. Give a GGUF file of it instead"
        )
    with quiet_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype_name))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, directory)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        num_heads = next((number for ending, number in heads.items() if name.endswith(ending)), None)
        if num_heads is not None:
            tensor = _rotated_pairwise(tensor, num_heads)
        is_half = dtype_name == "bfloat16" and tensor.ndim > 1
        kind = gguf.GGMLQuantizationType.BF16 if is_half else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(tensor.float().numpy(), kind)
        their_name = names.get_name(name, try_suffixes=(".weight",))
        assert their_name is not None, f"{name} belongs to a plain Llama"
        writer.add_tensor(their_name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotated_pairwise(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a Q or K projection in the order in which llama.cpp rotates them.

    transformers rotates dimension i of a head together with i + head_dim / 2, llama.cpp with its neighbour:

        rows of a head   a0 a1 a2 a3 | b0 b1 b2 b3   ->   a0 b0 a1 b1 a2 b2 a3 b3
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[1])  # (H, 2, D / 2, hidden)
    return halves.transpose(1, 2).reshape(weight.shape)  # (H * D, hidden)


def _add_vocabulary(writer: Any, directory: Path) -> None:
    source = directory / "tokenizer.json"
    if not source.is_file():
        raise ValueError(f"{directory} has no tokenizer.json: llama.cpp loads no model without a vocabulary")
    document = json.loads(source.read_text(encoding="utf-8"))
    bpe = document["model"]
    if bpe["type"] != "BPE":
        raise ValueError(f"{source} is of type {bpe['type']!r}; converted can be: BPE. Give a GGUF file instead")
    tokens = {token_id: token for token, token_id in bpe["vocab"].items()}
    kinds = dict.fromkeys(tokens, _NORMAL)
    for added in document["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how text is split; none is
    writer.add_token_list([tokens[token_id] for token_id in range(len(tokens))])
    writer.add_token_types([kinds[token_id] for token_id in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_add_bos_token(False)
