"""What a forward pass cannot go below: the bytes it must read, and its products, over the rates of this machine.

    floor = max(bytes / (bytes per second), operations / (operations per second))

Both rates are measured here, in on-CPU seconds and with as many threads as the benchmark uses; so the floor is in
on-CPU seconds too, and holds beside other work and for any number of threads. It assumes the best reuse: KV that exists
is never computed again, and what several requests share is read once. Dense models; the activations, small beside the
weights, are left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

FAR_BEYOND_CACHES = 2 << 30  # bytes; the largest last-level caches have a quarter of it
_MATMUL_SIZE = 1024
_REPETITIONS = 5  # of each rate; the best counts, as a floor must


@dataclass(frozen=True)
class ModelSize:
    """What of a model matters to the floor.

    weight_bytes            read by each pass: all parameters but the embedding's rows, the head included. Where head
                            and embedding are one tensor, it is read as the head
    body_parameters         of the matrices that each token is multiplied with, without the head
    head_parameters         of the head, with which only those tokens are multiplied whose logits are wanted
    kv_bytes_per_token      K and V of all layers
    operations_per_pair     of the attention, for one query and one key in all layers
    """

    weight_bytes: int
    body_parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    operations_per_pair: int


@dataclass(frozen=True)
class Rates:
    """What the machine does in one on-CPU second, measured: how, see `measure`."""

    bytes_per_s: float
    operations_per_s: float
    buffer_bytes: int
    reading: str


@dataclass(frozen=True)
class Work:
    """What a pass, or several, must do.

    num_passes    each reads the weights
    num_tokens    computed
    num_logits    tokens whose logits are wanted
    num_pairs     of a query and a key that it attends to
    num_kv_tokens read from the cache, those that several requests share once
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_logits: int = 0
    num_pairs: int = 0
    num_kv_tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + others for mine, others in zip(_fields(self), _fields(other), strict=True)))

    def num_bytes(self, size: ModelSize) -> int:
        """Read from memory."""
        return self.num_passes * size.weight_bytes + self.num_kv_tokens * size.kv_bytes_per_token

    def num_operations(self, size: ModelSize) -> int:
        """Multiplications and additions."""
        of_matrices = self.num_tokens * size.body_parameters + self.num_logits * size.head_parameters
        return 2 * of_matrices + self.num_pairs * size.operations_per_pair

    def floor_s(self, size: ModelSize, rates: Rates) -> float:
        """On-CPU seconds that it takes at least."""
        reading_s = self.num_bytes(size) / rates.bytes_per_s
        computing_s = self.num_operations(size) / rates.operations_per_s
        return max(reading_s, computing_s)


def _fields(work: Work) -> tuple[int, ...]:
    return tuple(asdict(work).values())


def decode_work(context_lens: list[int], num_shared: int = 0) -> Work:
    """One decode step. context_lens: tokens of each request, the new one included; the first num_shared are common."""
    num_kv_tokens = num_shared + sum(context_len - num_shared for context_len in context_lens)
    batch = len(context_lens)
    return Work(1, batch, batch, sum(context_lens), num_kv_tokens)


def prefill_work(prompt_lens: list[int], num_cached: list[int], num_shared: int = 0) -> Work:
    """One pass that gives the first token of each prompt; its first tokens (num_cached) have their KV already.

    num_shared: of the cached tokens, how many are common to all prompts.
    """
    num_tokens = num_pairs = 0
    for prompt_len, cached in zip(prompt_lens, num_cached, strict=True):
        num_tokens += prompt_len - cached
        # The query at position i attends to i + 1 keys.
        num_pairs += (prompt_len * (prompt_len + 1) - cached * (cached + 1)) // 2
    num_kv_tokens = num_shared + sum(cached - num_shared for cached in num_cached)
    return Work(1, num_tokens, len(prompt_lens), num_pairs, num_kv_tokens)


# ---------------------------------------------------------------- what is measured


def size_of(model: str, dtype_name: str) -> ModelSize:
    """The sizes of a model, from its configuration alone. model: a directory or hub id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    head = empty.get_output_embeddings().weight
    embedding = empty.get_input_embeddings().weight
    body = [parameter for parameter in empty.parameters() if parameter is not head and parameter is not embedding]
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    item_bytes = getattr(torch, dtype_name).itemsize
    return ModelSize(
        weight_bytes=(sum(parameter.numel() for parameter in body) + head.numel()) * item_bytes,
        body_parameters=sum(parameter.numel() for parameter in body if parameter.ndim > 1),
        head_parameters=head.numel(),
        kv_bytes_per_token=2 * config.num_hidden_layers * num_kv_heads * head_dim * item_bytes,
        operations_per_pair=4 * config.num_hidden_layers * num_heads * head_dim,  # q · k, and the sum of the values
    )


def measure(dtype_name: str, threads: int, weight_bytes: int, far_bytes: int = FAR_BEYOND_CACHES) -> Rates:
    """The machine's rates per on-CPU second, the best of several ways and repetitions.

    Reading: the sum of a buffer, its product with a vector, the copy of its half to the other (read and written), each
    on a buffer as large as the weights, which may stay in a large cache, and on one of far_bytes, beyond all caches.
    Products: of two square matrices in the dtype.
    """
    import torch

    torch.set_num_threads(threads)
    reading = []
    for buffer_bytes in sorted({max(weight_bytes, 1 << 20), far_bytes}):
        columns = 1024
        buffer = torch.ones(buffer_bytes // 4 // columns, columns)
        vector = torch.ones(columns)
        reading += [
            (buffer.nbytes / _best_s(buffer.sum), buffer.nbytes, "sum"),
            (buffer.nbytes / _best_s(lambda buffer=buffer, vector=vector: buffer @ vector), buffer.nbytes, "product"),
        ]
        half = len(buffer) // 2
        copy_s = _best_s(lambda buffer=buffer, half=half: buffer[:half].copy_(buffer[half : 2 * half]))
        reading.append((2 * buffer[:half].nbytes / copy_s, buffer.nbytes, "copy"))
    bytes_per_s, buffer_bytes, how = max(reading)
    size = _MATMUL_SIZE
    left, right = (torch.randn(size, size).to(getattr(torch, dtype_name)) for _ in range(2))
    return Rates(bytes_per_s, 2 * size**3 / _best_s(lambda: left @ right), buffer_bytes, how)


def _best_s(call: Callable[[], object]) -> float:
    call()
    times_s = []
    for _ in range(_REPETITIONS):
        start_s = time.process_time()
        call()
        times_s.append(time.process_time() - start_s)
    return min(times_s)


def main(job: dict[str, str | int]) -> None:
    """Prints sizes and rates as a line of JSON, for the parent that asked in a process with the right threads."""
    dtype_name = str(job["dtype"])
    size = size_of(str(job["model"]), dtype_name)
    rates = measure(dtype_name, int(job["threads"]), size.weight_bytes, int(job["far_bytes"]))
    print(json.dumps({"size": asdict(size), "rates": asdict(rates)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
