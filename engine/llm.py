"""`LLM`: what a user holds. Text and messages in, text out, with a prefix cache in between.

>>> from engine import LLM, SamplingParams                                        # doctest: +SKIP
>>> llm = LLM("smollm2-135m")                                                     # doctest: +SKIP
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text   # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from radixkv import PrefixCache, TokenKey
from radixkv.storage import KVStorage
from radixkv.tokens import NamespaceLike

from .config import EngineConfig, parse_size
from .core import EngineCore
from .models.huggingface import HuggingFaceDecoder
from .request import CompletionOutput, Request, RequestMetrics, RequestOutput
from .runner import ModelRunner
from .sampling_params import SamplingParams
from .scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Message: TypeAlias = Mapping[str, Any]

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "namespace"}


class LLM:
    """A decoder with a paged KV pool and a radix tree over it.

    model            "smollm2-135m" (the demo model), a hub id, a local directory, or a loaded transformers model
    dtype, device    as torch takes them; dtype "auto" is the checkpoint's own
    block_size       tokens per block
    num_blocks       size of the pool; without it, as many as `kv_cache_memory` holds
    kv_cache_memory  bytes, or text such as "2GiB"
    policy           eviction policy, see `radixkv.eviction`
    max_model_len    tokens of one request at most; None = the model's context
    max_num_seqs, max_num_batched_tokens   requests, and tokens, in one step at most
    enable_prefix_caching   off: nothing is kept, nothing is found

    Raises ModelNotFound, UnsupportedModel (its outputs would not be its own), ValueError and TypeError.
    """

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | HuggingFaceDecoder,
        *,
        dtype: Any = "auto",
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str = "2GiB",
        policy: str = "lru",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
    ) -> None:
        memory = parse_size(kv_cache_memory)
        # Checked before the model is loaded, which takes long; the two placeholders are known only after.
        config = EngineConfig(
            block_size=block_size,
            num_blocks=1 if num_blocks is None else num_blocks,
            max_model_len=1 if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
        )
        decoder = model if isinstance(model, HuggingFaceDecoder) else HuggingFaceDecoder.load(model, dtype, device)
        if num_blocks is None:
            bytes_per_block = KVStorage.bytes_per_block_of(decoder.layers, block_size, decoder.dtype)
            num_blocks = memory // bytes_per_block
            if num_blocks < 1:
                raise ValueError(f"kv_cache_memory is {memory} bytes; one block of this model takes {bytes_per_block}")
        if max_model_len is not None and max_model_len > decoder.max_model_len:
            raise ValueError(f"max_model_len is {max_model_len}; the model's context is {decoder.max_model_len}")
        self._config = replace(config, num_blocks=num_blocks, max_model_len=max_model_len or decoder.max_model_len)
        self._decoder = decoder
        storage = KVStorage(num_blocks, block_size, decoder.layers, decoder.dtype, decoder.device)
        self.cache = PrefixCache(num_blocks, block_size, policy, storage)
        self._core = EngineCore(Scheduler(self._config, self.cache), ModelRunner(decoder, storage), self.cache)
        self._ids = itertools.count()

    # ---------------------------------------------------------------- facts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises ValueError if it came without one."""
        if self._decoder.tokenizer is None:
            raise ValueError(f"{self.model_name} has no tokenizer: give prompts as token ids")
        return self._decoder.tokenizer

    @property
    def model_name(self) -> str:
        """The model as it was named."""
        return self._decoder.name

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and KV, as in "float32"."""
        return str(self._decoder.dtype).removeprefix("torch.")

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._config.block_size

    @property
    def max_model_len(self) -> int:
        """Tokens of one request at most, prompt and output together."""
        return self._config.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a reply."""
        return self._decoder.eos_token_ids

    def without_cache(self) -> LLM:
        """An engine on the same weights with a pool of its own that keeps nothing: what to compare with."""
        config = self._config
        return LLM(
            self._decoder,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            policy=config.policy,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=False,
        )

    # ---------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """An output for each prompt, in their order; all of them share each step.

        prompts: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}` with an optional "namespace", or a
        list of these. params: for all, or one for each. progress: a bar on stderr.
        Raises ValueError or TypeError for a prompt that is empty, too long, or has ids outside the vocabulary, before
        any of them starts. If it is interrupted, no request is left behind.
        """
        prompt_list = [prompts] if _is_single(prompts) else list(prompts)
        if params is None:
            params = SamplingParams()
        if not isinstance(params, (SamplingParams, list, tuple)):
            raise TypeError(f"params must be SamplingParams, or a list of them, not {params!r}")
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else list(params)
        if len(params_list) != len(prompt_list):
            raise ValueError(
                f"{len(params_list)} sampling params for {len(prompt_list)} prompts; allowed: one, or one for each"
            )
        requests = [self._request(*pair) for pair in zip(prompt_list, params_list, strict=True)]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: NamespaceLike = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """The assistant's next message for a conversation, or for each of a list of them, by the model's chat template.

        messages: `[{"role": "user", "content": "..."}, ...]`. The text of earlier replies is tokenised again, which can
        split it otherwise than it was generated: the output is right, but a hit may then end where the ids differ.
        `engine.chats.ChatSession` keeps the ids instead, and hits the whole previous turn.
        """
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Sequence[Message]] = [messages] if is_single else messages  # type: ignore[list-item,assignment]
        prompts = [
            {"prompt_token_ids": self._chat_token_ids(conversation), "namespace": namespace}
            for conversation in conversations
        ]
        return self.generate(prompts, params, progress=progress)

    def _chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise ValueError("messages is empty; allowed: at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"a message needs a role and a content, not {message!r}")
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(f"{self.model_name} has no chat template: use generate, or engine.chats.ChatSession")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    # ---------------------------------------------------------------- inside

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {params!r}")
        namespace: NamespaceLike = None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_FIELDS
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError(
                    f"a prompt has either prompt or prompt_token_ids, and namespace if wanted, not {sorted(prompt)}"
                )
            namespace = prompt.get("namespace")
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        key = TokenKey(token_ids, namespace)
        token_ids = list(key)
        if not token_ids:
            raise ValueError("the prompt is empty; allowed: one token and more")
        if max(token_ids) >= self._decoder.vocab_size:
            raise ValueError(
                f"token id {max(token_ids)} is not in the vocabulary; allowed: 0 to {self._decoder.vocab_size - 1}"
            )
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; allowed: at most {self.max_model_len - 1}, so that one more "
                f"fits the context of {self.max_model_len}"
            )
        return Request(
            request_id=str(next(self._ids)),
            prompt=key,
            prompt_token_ids=token_ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.max_model_len),
        )

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        bar = None
        if progress:
            from tqdm import tqdm

            bar = tqdm(total=len(requests), unit="request")
        try:
            for request in requests:
                self._core.add_request(request)
            while self._core.has_requests:
                num_finished = len(self._core.step())
                if bar is not None:
                    bar.update(num_finished)
        finally:
            for request in requests:
                self._core.abort(request.request_id)  # none is left, unless something went wrong
            if bar is not None:
                bar.close()
        return [self._output(request) for request in requests]

    def _output(self, request: Request) -> RequestOutput:
        tokenizer = self._decoder.tokenizer
        text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True) if tokenizer is not None else ""
        completion = CompletionOutput(0, text, request.output_token_ids, request.finish_reason)
        metrics = RequestMetrics.of(request)
        return RequestOutput(
            request.request_id, request.prompt_token_ids, [completion], request.num_cached_tokens, metrics
        )

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, dtype={self.dtype_name}, {self.cache!r})"


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """One prompt rather than a list of them: text, a mapping, or something that holds token ids."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, (list, tuple)):
        return True
    # An array or tensor of one id can serve as an index too, and is a prompt all the same.
    return bool(prompts) and hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0)
