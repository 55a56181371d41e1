"""Whom to stop when a decode finds no block. Imports no torch.

Whoever computes nothing at the moment (a paused beam) goes first, then the lowest priority, then those that have not
been preempted `PATIENCE` times; the policy decides among the rest, and between equals the one that was admitted last
goes, which has waited least for what it would lose.

    lifo            who was admitted last: the oldest always finish, so nothing starves
    largest         who has the most tokens: the fewest preemptions for the blocks, at the price of the most work lost
    least-progress  who has the fewest output tokens: a reply that is nearly done is not broken off
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .request import Request

# Without it, "largest" would stop a long request again for each short one that comes.
PATIENCE = 3

_RANKS: dict[str, Callable[[Request], int]] = {
    "lifo": lambda request: 0,
    "largest": lambda request: request.num_tokens,
    "least-progress": lambda request: -len(request.output_token_ids),
}


def choose_victim(policy: str, running: Sequence[Request]) -> Request:
    """The running request to stop. running: in order of admission, at least one; policy: a name of the table above."""
    rank = _RANKS[policy]

    def badness(place: int) -> tuple[bool, int, bool, int, int]:
        request = running[place]
        is_patient = request.num_preemptions < PATIENCE
        return request.num_pending_tokens == 0, -request.priority, is_patient, rank(request), place

    return running[max(range(len(running)), key=badness)]
