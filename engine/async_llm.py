"""`AsyncLLM`: one engine that many coroutines share.

>>> async with AsyncLLM("smollm2-135m") as llm:                                            # doctest: +SKIP
...     async for text in llm.stream("The capital of France is"):
...         print(text, end="")

A task of the event loop drives the engine while there are requests: each step runs in a thread, so that the loop stays
free, and between two steps, in the loop's thread, requests come and go and texts are handed out. So the engine is never
touched from two threads at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

from radixkv.tokens import NamespaceLike

from .llm import LLM, Message, Prompt
from .metrics import EngineMetrics
from .request import Request, RequestOutput
from .sampling_params import SamplingParams
from .stream import DeltaReader, TextDelta


class _Failure(NamedTuple):
    """What ends a stream instead of an output. Many raise the same error, and each would add to its traceback."""

    error: Exception
    traceback: TracebackType | None


class _Client:
    """One request, and the coroutine that waits for what it gives.

    must_end   the coroutine has left, or somebody aborted the request: the driver ends it before the next step
    """

    def __init__(self, request: Request, readers: list[DeltaReader]) -> None:
        self.request = request
        self.sequences = list(request.sequences())
        self.readers = readers
        self.inbox: asyncio.Queue[TextDelta | _Failure] = asyncio.Queue()
        self.must_end = False

    @property
    def is_finished(self) -> bool:
        """All continuations have ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)


class AsyncLLM:
    """An `LLM` for asyncio: the same arguments, and `stream`, `generate` and `chat` as coroutines.

    model, arguments: as `LLM` takes them, or an `LLM` that is not used otherwise while requests are under way here

    All requests that are under way share each step. A coroutine that is cancelled, or leaves its stream, takes its
    request along: it is gone before the step after the next. For one event loop at a time.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        if isinstance(model, LLM) and arguments:
            raise TypeError(f"an LLM that is made already takes no more arguments, not {sorted(arguments)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        self._clients: list[_Client] = []
        self._arrivals: list[_Client] = []
        self._driver: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---------------------------------------------------------------- generating

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """The text of one prompt as it comes, see `LLM.stream`.

        Raises ValueError or TypeError for a bad prompt at once. With the first text: ValueError for a prompt that the
        pool has no room for, DuplicateRequest for an id that is in use. RuntimeError once the engine is closed, while
        another event loop uses it, or if the loop is shut down; and whatever a step raises.
        """
        return self._stream(self.llm.make_request(prompt, params or SamplingParams(), request_id, is_streamed=True))

    async def _stream(self, request: Request) -> AsyncGenerator[TextDelta, None]:
        client = _Client(request, self.llm.readers(list(request.sequences())))
        self._wake()
        self._arrivals.append(client)
        try:
            while True:
                delta = await client.inbox.get()
                if isinstance(delta, _Failure):
                    raise delta.error.with_traceback(delta.traceback)
                yield delta
                if delta.output is not None:
                    return
        finally:
            client.must_end = True

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """The output for one prompt. Many calls at once, as with `asyncio.gather`, share each step."""
        async with contextlib.aclosing(self.stream(prompt, params, request_id=request_id)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    return delta.output
        raise AssertionError("a stream ends with its output, or raises")

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        namespace: NamespaceLike = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """The assistant's next message for one conversation, see `LLM.chat`."""
        return await self.generate(self.llm.chat_prompt(messages, namespace), params, request_id=request_id)

    # ---------------------------------------------------------------- ending

    async def abort(self, request_id: str) -> bool:
        """Ends a request; False if there is no such request (any more).

        Its stream ends with finish reason "abort", unless the step that runs is its last anyway.
        """
        for client in self._alive():
            if client.request.request_id == request_id:
                client.must_end = True
                return True
        return False

    async def abort_all(self) -> int:
        """Ends all requests, see `abort`; how many that were."""
        alive = self._alive()
        for client in alive:
            client.must_end = True
        return len(alive)

    async def close(self) -> None:
        """Ends all requests and takes no more. Open streams end with finish reason "abort"."""
        self._is_closed = True
        await self.abort_all()
        if self._driver is not None and not self._driver.done():
            await asyncio.shield(self._driver)  # to cancel who closes is not to cancel what the others read

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def metrics(self) -> EngineMetrics:
        """See `LLM.metrics`; while a step runs, the numbers of the middle of it."""
        return self.llm.metrics()

    # ---------------------------------------------------------------- the driver

    def _wake(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed")
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        elif self._driver.get_loop() is not loop:
            raise RuntimeError("another event loop uses this engine; allowed: one at a time")

    async def _drive(self) -> None:
        """Steps while there is a client. If a step fails, all clients hear of it, and no request is left behind."""
        try:
            # A thread cannot be stopped half-way: leaving this block waits for the step that runs.
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as executor:
                while True:
                    self._let_out()
                    self._let_in()
                    if not self._clients:
                        return
                    await asyncio.wrap_future(executor.submit(self.llm.core.step))
                    for client in self._clients:
                        self._read(client)
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._fail(RuntimeError("the event loop was shut down"))
            raise

    def _fail(self, error: Exception) -> None:
        clients = [*self._clients, *self._arrivals]
        self._clients, self._arrivals = [], []
        for client in clients:
            client.inbox.put_nowait(_Failure(error, error.__traceback__))
        for client in clients:
            self.llm.end(client.sequences)

    def _let_out(self) -> None:
        """Ends the requests whose coroutines have left, and forgets those that have ended."""
        for client in self._clients:
            if client.must_end and not client.is_finished:
                self.llm.end(client.sequences)
                self._read(client)
        self._clients = [client for client in self._clients if not client.is_finished]

    def _let_in(self) -> None:
        """Adds the requests that came, after `_let_out`: an id is free again when its stream was left."""
        for client in self._arrivals:
            if client.must_end:
                for sequence in client.sequences:
                    sequence.finish("abort", self.llm.core.scheduler.clock())
                self._read(client)
                continue
            try:
                self.llm.core.add_request(client.request)
            except ValueError as error:
                client.inbox.put_nowait(_Failure(error, error.__traceback__))
            else:
                self._clients.append(client)
        self._arrivals = []

    def _alive(self) -> list[_Client]:
        """Those whose requests are to go on."""
        return [client for client in [*self._clients, *self._arrivals] if not client.must_end]

    def _read(self, client: _Client) -> None:
        for delta in self.llm.deltas(client.sequences, client.readers):
            client.inbox.put_nowait(delta)
