"""What a replay showed, turn by turn: how much of the prompts was cached, and how soon the first token came.

Two rows of bars over the same turns. With a comparison each turn has two bars of time, without the cache and with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from . import svg
from .overview import check_size
from .subjects import Turns
from .svg import MARGIN

MOST_BARS = 32
LEFT = 58  # pixels for the numbers of the axes
CACHED, COLD = svg.EVICTABLE[0], "#b7c0c9"


class _Bar(NamedTuple):
    """One turn, or several next to each other whose means are shown."""

    words: str
    num_turns: int
    ttft_s: float
    cold_s: float | None
    hit_rate: float


def draw_turns(turns: Sequence[Turns], *, width: int = 960, title: str | None = None, remark: str = "") -> str:
    """Hit rate and time to the first token by turn, as one SVG of bars.

    turns    in order; more than 32 are drawn as means of neighbours
    title    instead of the sentence that says what the last turn gained
    remark   a line below it
    Raises ValueError for a width below 480. Otherwise as `draw_cache`. O(turns).
    """
    check_size(1, width)
    bars = _bars(turns)
    room = width - 2 * MARGIN
    head = title or _gain(bars)
    parts = [
        svg.clipped(MARGIN, 8, room, 22, svg.text(0, 16, svg.fit(head, room, 14.5), 15, font_weight="600")),
        svg.text(MARGIN, 45, svg.fit(remark, room, 11.5), 12),
    ]
    if not bars:
        return svg.picture(width, 60, head, parts)
    top = 62.0 if remark else 46.0
    parts += _panel(bars, top, 70, width, "prompt tokens that were hits", [[bar.hit_rate for bar in bars]], 1.0, "%")
    times_s = [[bar.ttft_s for bar in bars]]
    is_compared = all(bar.cold_s is not None for bar in bars)
    if is_compared:
        times_s.insert(0, [bar.cold_s or 0.0 for bar in bars])
    most_s = _round_up(max(max(series) for series in times_s))
    parts += _panel(bars, top + 136, 110, width, "median time to the first token, in ms", times_s, most_s, "ms")
    bottom = top + 136 + 110 + 54
    if is_compared:
        entries = [(svg.swatch(COLD), "without the cache"), (svg.swatch(CACHED), "with it")]
        parts.append(svg.legend(width - MARGIN - 230, top + 102, 230, entries)[0])
    parts += [
        svg.text(LEFT + _step(bars, width) * (place + 0.5), bottom - 14, words, 11, svg.QUIET, text_anchor="middle")
        for place, words in _tick_words(bars, _step(bars, width))
    ]
    parts.append(svg.text(MARGIN, bottom - 14, "turn", 11, svg.QUIET))
    return svg.picture(width, bottom, head, parts)


def _bars(turns: Sequence[Turns]) -> list[_Bar]:
    per_bar = -(-len(turns) // MOST_BARS)
    bars = []
    for first in range(0, len(turns), max(per_bar, 1)):
        group = turns[first : first + per_bar]
        cold_s = [turn.median_ttft_cold_s for turn in group if turn.median_ttft_cold_s is not None]
        words = f"{group[0].turn}" if len(group) == 1 else f"{group[0].turn}-{group[-1].turn}"
        bars.append(
            _Bar(
                words,
                sum(turn.num_turns for turn in group),
                sum(turn.median_ttft_s for turn in group) / len(group),
                sum(cold_s) / len(cold_s) if len(cold_s) == len(group) else None,
                sum(turn.token_hit_rate for turn in group) / len(group),
            )
        )
    return bars


def _gain(bars: list[_Bar]) -> str:
    """What the last turns gained, in a sentence."""
    if not bars:
        return "No turn was played."
    last = bars[-1]
    said = f"Turn {last.words}: {last.hit_rate:.0%} of the prompt cached, first token"
    if not last.cold_s or not last.ttft_s:
        return f"{said} after {_ms(last.ttft_s)} ms"
    times = last.cold_s / last.ttft_s
    compared = f"{times:.1f} times sooner" if times >= 1 else f"{1 / times:.1f} times later"
    return f"{said} {compared} ({_ms(last.ttft_s)} ms instead of {_ms(last.cold_s)})"


def _step(bars: list[_Bar], width: int) -> float:
    """Pixels that a turn has."""
    return min((width - LEFT - MARGIN) / len(bars), 150.0)


def _panel(
    bars: list[_Bar],
    top: float,
    height: float,
    width: int,
    words: str,
    series: list[list[float]],
    most: float,
    unit: str,
) -> list[str]:
    """One row of bars under its words. series: the values of each turn, up to `most`; the last are with the cache."""
    step = _step(bars, width)
    bottom = top + 20 + height
    parts = [svg.text(MARGIN, top + 6, words, 12, font_weight="600")]
    for part in (0.0, 0.5, 1.0):
        y = bottom - part * height
        parts.append(svg.rect(LEFT, y - 0.5, len(bars) * step, 1, svg.BORDER))
        parts.append(svg.text(LEFT - 6, y + 4, _value(part * most, unit), 10.5, svg.QUIET, text_anchor="end"))
    thick = min(step * 0.8, 64.0) / len(series)
    for place, bar in enumerate(bars):
        middle = LEFT + step * (place + 0.5)
        title = f"turn {bar.words}, {svg.count(bar.num_turns, 'prompt')}: {bar.hit_rate:.1%} hits, first token after "
        title += f"{_ms(bar.ttft_s)} ms" + ("" if bar.cold_s is None else f", {_ms(bar.cold_s)} ms without the cache")
        inside = [svg.hover(title)]
        for number_of, values in enumerate(series):
            pixels = min(values[place] / most, 1.0) * height
            x = middle + (number_of - len(series) / 2) * thick
            fill = CACHED if number_of == len(series) - 1 else COLD
            inside.append(svg.rect(x, bottom - pixels, thick - 1.5, pixels, fill))
            label = _value(values[place], unit)
            if len(label) * 6.6 <= thick:
                y = bottom - pixels - 4
                inside.append(svg.text(x + thick / 2, y, label, 10.5, svg.INK, text_anchor="middle"))
        parts.append(svg.element("g", "".join(inside), class_="turn"))
    return parts


def _tick_words(bars: list[_Bar], step: float) -> list[tuple[int, str]]:
    """Places and names of the turns that have room for a name."""
    longest = max(len(bar.words) for bar in bars) * 7 + 6
    every = max(1, -(-int(longest) // max(int(step), 1)))
    return [(place, bar.words) for place, bar in enumerate(bars) if place % every == 0]


def _value(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else _ms(value)


def _ms(seconds: float) -> str:
    """Milliseconds with three digits."""
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 100 or not ms else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _round_up(seconds: float) -> float:
    """The next of 1, 2, 4, 6, 8 and 10 times a power of ten: a scale whose half is short to write, too."""
    if not seconds > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(digit * power for digit in (1, 2, 4, 6, 8, 10, 20) if digit * power >= seconds)
