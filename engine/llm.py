"""`LLM`: what a user holds. Text and messages in, text out, with a prefix cache in between.

>>> from engine import LLM, SamplingParams                                        # doctest: +SKIP
>>> llm = LLM("smollm2-135m")                                                     # doctest: +SKIP
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text   # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from radixkv import PrefixCache, TokenKey
from radixkv.arguments import at_least
from radixkv.storage import KVStorage
from radixkv.tokens import NamespaceLike

from .beam_search import BeamSearchParams
from .beams import Beams
from .config import EngineConfig, parse_size
from .core import EngineCore
from .detokenizer import Detokenizer
from .logprobs import Logprob
from .metrics import EngineMetrics
from .models.decoder import Decoder
from .request import CompletionOutput, Request, RequestMetrics, RequestOutput
from .runner import ModelRunner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .stream import DeltaReader, TextDelta
from .swap import HostSwap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Message: TypeAlias = Mapping[str, Any]

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "namespace", "priority", "store", "request_id"}


class LLM:
    """A decoder with a paged KV pool and a radix tree over it.

    model            "smollm2-135m" (the demo model), a hub id, a local directory, or a loaded transformers model
    dtype, device    as torch takes them; dtype "auto" is the checkpoint's own, device "auto" a GPU if there is one
    model_impl       "native" (our own code for the Llama family), "transformers" (the unmodified model, any), or "auto"
    attention        "tree" (what requests share is read once for all), "gather" (each reads its own), or "auto"
    block_size       tokens per block
    num_blocks       size of the pool; without it, as many as `kv_cache_memory` holds
    kv_cache_memory  bytes, or text such as "2GiB"
    policy           eviction policy, see `radixkv.eviction`
    max_model_len    tokens of one request at most; None = the model's context
    max_num_seqs, max_num_batched_tokens   sequences, and tokens, in one step at most
    enable_prefix_caching   off: nothing is kept, nothing is found
    order, max_overtakes, victim, preemption   who is admitted next, who gives way and how, see `EngineConfig`
    swap_memory      host memory for preemption="swap", in bytes or as text
    log_interval_s   seconds between two lines of the logger "engine" while it is busy (level INFO); 0 = none

    Raises ModelNotFound, UnsupportedModel (its outputs would not be its own), ValueError and TypeError.
    """

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | Decoder,
        *,
        dtype: Any = "auto",
        device: str = "cpu",
        model_impl: str = "auto",
        attention: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str = "2GiB",
        policy: str = "lru",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        order: str = "fcfs",
        max_overtakes: int = 32,
        victim: str = "lifo",
        preemption: str = "recompute",
        swap_memory: int | str = "1GiB",
        log_interval_s: float = 5.0,
    ) -> None:
        memory, memory_for_swap = parse_size(kv_cache_memory), parse_size(swap_memory)
        # Checked before the model is loaded, which takes long; the two placeholders are known only after.
        config = EngineConfig(
            block_size=block_size,
            num_blocks=1 if num_blocks is None else num_blocks,
            max_model_len=1 if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            order=order,
            max_overtakes=max_overtakes,
            victim=victim,
            preemption=preemption,
            attention=attention,
        )
        decoder = model if isinstance(model, Decoder) else Decoder.load(model, dtype, device, model_impl)
        bytes_per_block = KVStorage.bytes_per_block_of(decoder.layers, block_size, decoder.dtype)
        if num_blocks is None:
            num_blocks = memory // bytes_per_block
            if num_blocks < 1:
                raise ValueError(f"kv_cache_memory is {memory} bytes; one block of this model takes {bytes_per_block}")
        if max_model_len is not None and max_model_len > decoder.max_model_len:
            raise ValueError(f"max_model_len is {max_model_len}; the model's context is {decoder.max_model_len}")
        self._config = replace(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len or decoder.max_model_len,
            num_swap_blocks=memory_for_swap // bytes_per_block if preemption == "swap" else 0,
        )
        self._decoder = decoder
        # No id that a user would think of: theirs and these live side by side.
        self._ids = (f"{prefix}-{number}" for prefix in [secrets.token_hex(4)] for number in itertools.count())
        storage = KVStorage(num_blocks, block_size, decoder.layers, decoder.dtype, decoder.device)
        self.cache = PrefixCache(num_blocks, block_size, policy, storage)
        if decoder.tokenizer is not None:
            self.cache.decode = decoder.tokenizer.decode  # so that a drawn node shows its text
        swap = HostSwap(storage) if preemption == "swap" else None
        scheduler = Scheduler(self._config, self.cache, swap)
        self.core = EngineCore(scheduler, ModelRunner(decoder, storage, attention), self.cache, log_interval_s)

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
    def model_impl(self) -> str:
        """How the model is run: "native" or "transformers"."""
        return self._decoder.model_impl

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
            order=config.order,
            max_overtakes=config.max_overtakes,
            victim=config.victim,
            attention=config.attention,
        )

    def metrics(self) -> EngineMetrics:
        """Running and waiting requests, block use, and totals of tokens, preemptions and what these cost."""
        return self.core.metrics()

    # ---------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """An output for each prompt, in their order; all of them share each step.

        prompts: text, token ids, a mapping (see below), or a list of these. params: for all, or one for each.
        progress: a bar on stderr.

        A mapping has `prompt` (text) or `prompt_token_ids`, and if wanted `namespace` (nothing is shared across it),
        `priority` (0 and more; higher goes first), `store` (False: nothing of it is kept for others) and `request_id`.

        Raises ValueError or TypeError for a prompt that is empty, too long, or has ids outside the vocabulary, before
        any of them starts. If it is interrupted, no request is left behind.
        """
        prompt_list, params_list = _pairs(prompts, params, SamplingParams)
        requests = [self.make_request(*pair) for pair in zip(prompt_list, params_list, strict=True)]
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
        prompts = [self.chat_prompt(conversation, namespace) for conversation in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[TextDelta]:
        """The text of one prompt as it comes: strings that add up to the text that `generate` gives.

        Never half a character, nor text that a stop string may still take back. Each string also has `continuation`
        (which one, where n > 1), `token_ids`, and at the end `finish_reason` and `output`, the whole `RequestOutput`.
        Closing the iterator, or leaving it to the garbage collector, ends the request. Several streams, and `generate`
        beside them, share each step.
        """
        request = self.make_request(prompt, params or SamplingParams(), request_id, is_streamed=True)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[TextDelta]:
        sequences = list(request.sequences())
        readers = self.readers(sequences)
        try:
            self.core.add_request(request)
            while True:
                # What is there comes first: a step that others made may have brought it, and may have been the last.
                is_finished = all(sequence.finish_reason is not None for sequence in sequences)
                deltas = list(self.deltas(sequences, readers))
                yield from deltas
                if is_finished:
                    return
                if not deltas:
                    self.core.step()
        finally:
            self.end(sequences)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        The same as `transformers` finds with `num_beams`. The prompt is computed once; in each step the beams that live
        on are forked, so that they share all blocks but the one they write to, and the others are dropped.
        """
        prompt_list, params_list = _pairs(prompts, params, BeamSearchParams)
        beams = [self._beams(*pair) for pair in zip(prompt_list, params_list, strict=True)]
        bar = _bar(progress, len(beams))
        try:
            for group in beams:
                group.start()
            while any(not group.is_finished for group in beams):
                self.core.step()
                for group in beams:
                    bar.update(group.advance())
        finally:
            for group in beams:
                group.close()
            bar.close()
        return [self._beam_output(group) for group in beams]

    # ---------------------------------------------------------------- for other drivers of the engine

    def chat_prompt(self, messages: Sequence[Message], namespace: NamespaceLike = None) -> dict[str, Any]:
        """A conversation as a prompt, by the model's chat template, ready for the assistant's next message."""
        if not messages:
            raise ValueError("messages is empty; allowed: at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"a message needs a role and a content, not {message!r}")
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(f"{self.model_name} has no chat template: use generate, or engine.chats.ChatSession")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False), "namespace": namespace}

    def make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, is_streamed: bool = False
    ) -> Request:
        """The request for a prompt, with a fork for each continuation after the first; checked, not yet added.

        is_streamed: its text is followed while it runs, for `readers`.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {params!r}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        first = self._request(prompt, params, request_id)
        if params.stop and self._decoder.tokenizer is None:
            raise ValueError(f"{self.model_name} has no tokenizer: stop strings need one; use stop_token_ids")
        for index in range(params.n):
            sequence = first if index == 0 else first.sibling(f"{first.request_id}/{index}")
            sequence.seed = seed + index
            if self._decoder.tokenizer is not None and (params.stop or is_streamed):
                sequence.text = Detokenizer(
                    self._decoder.tokenizer, params.stop or (), params.include_stop_str_in_output
                )
            if index:
                first.forks.append(sequence)
        return first

    def readers(self, sequences: Sequence[Request]) -> list[DeltaReader]:
        """A reader for each continuation of a request made with `is_streamed`."""
        return [DeltaReader(sequence, index) for index, sequence in enumerate(sequences)]

    def deltas(self, sequences: Sequence[Request], readers: Sequence[DeltaReader]) -> Iterator[TextDelta]:
        """What came for a request since the last call. The last delta of all brings the output."""
        deltas = [delta for reader in readers if (delta := reader.read()) is not None]
        if deltas and all(sequence.finish_reason is not None for sequence in sequences):
            deltas[-1].output = self.output_of(sequences)
        return iter(deltas)

    def output_of(self, sequences: Sequence[Request]) -> RequestOutput:
        """What a request gave, from all its continuations."""
        first = sequences[0]
        of_prompt = None
        if first.params.prompt_logprobs is not None:
            of_prompt = [self._with_text(entry) for entry in first.prompt_logprobs]
        return RequestOutput(
            request_id=first.request_id,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[self._completion(index, sequence) for index, sequence in enumerate(sequences)],
            num_cached_tokens=first.num_cached_tokens,
            metrics=RequestMetrics.of(sequences),
            prompt_logprobs=of_prompt,
        )

    def end(self, sequences: Sequence[Request]) -> None:
        """Aborts what is left of a request: nothing, unless it was interrupted."""
        for sequence in sequences:
            if self.core.holds(sequence):
                self.core.abort(sequence.request_id)

    # ---------------------------------------------------------------- inside

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        fields: Mapping[str, Any] = {}
        if isinstance(prompt, Mapping):
            fields = prompt
            unknown = set(prompt) - _PROMPT_FIELDS
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError(
                    "a prompt has either prompt or prompt_token_ids, and namespace, priority, store and request_id if "
                    f"wanted, not {sorted(prompt)}"
                )
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        key = TokenKey(token_ids, fields.get("namespace"))
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
        store = fields.get("store", True)
        if not isinstance(store, bool):
            raise TypeError(f"store must be True or False, not {store!r}")
        request_id = fields.get("request_id") if request_id is None else request_id
        if request_id is None:
            request_id = next(self._ids)
        elif not isinstance(request_id, str) or not request_id:
            raise TypeError(f"a request id must be a string that is not empty, not {request_id!r}")
        return Request(
            request_id=request_id,
            prompt=key,
            prompt_token_ids=token_ids,
            params=params,
            seed=0,
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.max_model_len),
            priority=at_least(0, fields.get("priority", 0), "priority"),
            store=store,
        )

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        groups = [list(request.sequences()) for request in requests]
        unfinished = [sequence for group in groups for sequence in group]
        bar = _bar(progress, len(unfinished))
        try:
            for request in requests:
                self.core.add_request(request)
            while unfinished:
                self.core.step()
                still = [sequence for sequence in unfinished if sequence.finish_reason is None]
                bar.update(len(unfinished) - len(still))
                unfinished = still
        finally:
            for group in groups:
                self.end(group)
            bar.close()
        return [self.output_of(group) for group in groups]

    def _completion(self, index: int, sequence: Request) -> CompletionOutput:
        text = sequence.text.text if sequence.text is not None else self._text(sequence.output_token_ids)
        logprobs = cumulative = None
        if sequence.params.logprobs is not None:
            logprobs = [self._with_text(entry) for entry in sequence.logprobs]
            pairs = zip(sequence.output_token_ids, sequence.logprobs, strict=True)
            cumulative = sum(entry[token_id].logprob for token_id, entry in pairs)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of an output; empty for a model without a tokenizer."""
        tokenizer = self._decoder.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)

    def _with_text(self, entry: dict[int, Logprob] | None) -> Any:
        """Log-probabilities with the text of each token, where there is a tokenizer."""
        tokenizer = self._decoder.tokenizer
        if entry is None or tokenizer is None:
            return entry
        return {token_id: of._replace(decoded_token=tokenizer.decode([token_id])) for token_id, of in entry.items()}

    def _beams(self, prompt: Prompt, params: BeamSearchParams) -> Beams:
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, not {params!r}")
        request = self._request(prompt, SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos))
        return Beams(self.core, request, params)

    def _beam_output(self, beams: Beams) -> RequestOutput:
        outputs = [
            CompletionOutput(
                index,
                self._text(found.token_ids),
                found.token_ids,
                found.finish_reason,
                cumulative_logprob=found.cumulative_logprob,
            )
            for index, found in enumerate(beams.results())
        ]
        prompt = beams.prompt
        return RequestOutput(
            prompt.request_id, prompt.prompt_token_ids, outputs, prompt.num_cached_tokens, beams.metrics()
        )

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, dtype={self.dtype_name}, {self.cache!r})"


class _NoBar:
    """Stands where a progress bar is not wanted."""

    def update(self, num: int) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Nothing is open."""


def _bar(progress: bool, total: int) -> Any:
    if not progress:
        return _NoBar()
    from tqdm import tqdm

    return tqdm(total=total, unit="request")


def _pairs(prompts: Prompt | Sequence[Prompt], params: Any, kind: type[Any]) -> tuple[list[Prompt], list[Any]]:
    """Prompts and their params, one for each."""
    prompt_list: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
    if params is None:
        params = kind()
    if not isinstance(params, (kind, list, tuple)):
        raise TypeError(f"params must be {kind.__name__}, or a list of them, not {params!r}")
    params_list = [params] * len(prompt_list) if isinstance(params, kind) else list(params)
    if len(params_list) != len(prompt_list):
        raise ValueError(
            f"{len(params_list)} sampling params for {len(prompt_list)} prompts; allowed: one, or one for each"
        )
    return prompt_list, params_list


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """One prompt rather than a list of them: text, a mapping, or something that holds token ids."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, (list, tuple)):
        return True
    # An array or tensor of one id can serve as an index too, and is a prompt all the same.
    return bool(prompts) and hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0)
