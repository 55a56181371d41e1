"""Text as it comes. Imports no torch."""

from __future__ import annotations

from .request import FinishReason, Request, RequestOutput


class TextDelta(str):
    """Some more text of a continuation: a string, which also says what it belongs to.

    continuation   which one, where n > 1; `CompletionOutput.index`
    token_ids      the tokens that came since the last delta; some of their text may still be held back
    finish_reason  of the last delta of its continuation, else None
    output         the whole output, with the last delta of all
    """

    continuation: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: RequestOutput | None

    def __new__(
        cls,
        text: str,
        continuation: int = 0,
        token_ids: list[int] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> TextDelta:
        """The text with its attributes; `output` is set by whoever has it."""
        delta = super().__new__(cls, text)
        delta.continuation = continuation
        delta.token_ids = token_ids or []
        delta.finish_reason = finish_reason
        delta.output = None
        return delta


class DeltaReader:
    """Reads one continuation while it grows. Without a `text`, as of a model without a tokenizer, deltas are empty."""

    def __init__(self, sequence: Request, index: int) -> None:
        self.sequence = sequence
        self.index = index
        self._num_read = 0
        self._has_ended = False

    def read(self) -> TextDelta | None:
        """What came since the last delta; None if there is nothing new to show."""
        if self._has_ended:
            return None
        sequence = self.sequence
        self._has_ended = sequence.finish_reason is not None
        text = sequence.text.take() if sequence.text is not None else ""
        has_tokens = len(sequence.output_token_ids) > self._num_read
        if not (text or self._has_ended or (has_tokens and sequence.text is None)):
            return None
        token_ids = sequence.output_token_ids[self._num_read :]
        self._num_read += len(token_ids)
        return TextDelta(text, self.index, token_ids, sequence.finish_reason)
