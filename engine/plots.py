"""Plots of what `radixkv simulate` found, fit for a slide. Needs matplotlib, which is imported when it draws.

Labels stand at the lines they name, axes carry units, and nothing is drawn that the table does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.sim import BlockSizePoint, CostPoint, GroupHits, HitSources, MemoryUse, MissRatioCurve, PolicyPoint, Replay

from .pressure import Pressure

FORMATS = (".png", ".svg", ".pdf")
# Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


@dataclass
class Findings:
    """The records that have a shape: what was asked, empty where it was not."""

    replays: list[Replay] = field(default_factory=list)
    by_turn: list[tuple[Replay, list[GroupHits]]] = field(default_factory=list)
    sweep: list[PolicyPoint] = field(default_factory=list)
    curves: list[MissRatioCurve] = field(default_factory=list)
    block_sizes: list[BlockSizePoint] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)
    costs: list[CostPoint] = field(default_factory=list)
    sources: list[HitSources] = field(default_factory=list)
    preemption: list[Pressure] = field(default_factory=list)


def draw(findings: Findings, title: str, path: Path) -> None:
    """Draws everything that has a shape, one panel each, into one file.

    Raises ValueError for another file format, or if there is nothing to draw; ModuleNotFoundError without matplotlib.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot is {str(path)!r}; allowed: a name that ends in {', '.join(FORMATS)}")
    panels = _panels(findings)
    if not panels:
        raise ValueError("nothing here has a shape to draw: ask for --by-turn, --sweep, --curve, --memory, ...")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    figure.suptitle(title)
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def _panels(findings: Findings) -> list[Callable[[Any], None]]:
    panels: list[Callable[[Any], None]] = []
    if any(turns for _, turns in findings.by_turn):
        panels.append(lambda axis: _by_turn(axis, findings))
    elif findings.replays and all(result.block_hit_rate is not None for result in findings.replays):
        panels.append(lambda axis: _rates(axis, findings))
    if findings.sweep:
        panels.append(lambda axis: _sweep(axis, findings))
    if findings.curves:
        panels.append(lambda axis: _curve(axis, findings))
    if findings.block_sizes:
        panels.append(lambda axis: _block_sizes(axis, findings))
    if any(use.course for use in findings.memory):
        panels.append(lambda axis: _memory(axis, findings.memory))
    if findings.costs:
        panels.append(lambda axis: _costs(axis, findings))
    if any(record.within_tokens is not None for record in findings.sources):
        panels.append(lambda axis: _sources(axis, findings))
    if findings.preemption:
        panels.append(lambda axis: _preemption(axis, findings))
    return panels


def _line(axis: Any, name: str, xs: Sequence[float], ys: Sequence[float], place: int, **style: Any) -> None:
    """A line with its name at its end."""
    colour = _COLOURS[place % len(_COLOURS)]
    axis.plot(xs, ys, color=colour, **style)
    axis.annotate(name, (xs[-1], ys[-1]), xytext=(6, -4), textcoords="offset points", color=colour, fontsize=9)


def _percent(axis: Any, which: str = "yaxis") -> None:
    from matplotlib.ticker import PercentFormatter

    getattr(axis, which).set_major_formatter(PercentFormatter(1.0))


def _by_turn(axis: Any, findings: Findings) -> None:
    for place, (result, turns) in enumerate(findings.by_turn):
        known = [group for group in turns if group.token_hit_rate is not None]
        if known:
            size = "infinite" if result.num_blocks is None else f"{result.num_blocks:,} blocks"
            name = f"{result.policy}, {size}"
            _line(axis, name, [g.value for g in known], [g.token_hit_rate for g in known], place, marker="o", ms=3)
    axis.set(xlabel="turn of the conversation", ylabel="prompt tokens from the cache", ylim=(0, 1))
    _percent(axis)


def _rates(axis: Any, findings: Findings) -> None:
    names = []
    for result in findings.replays:
        size = "infinite" if result.num_blocks is None else f"{result.num_blocks:,}"
        names.append(f"{result.allocator}, {result.policy}\n{size} blocks")
    rates = [result.token_hit_rate or 0.0 for result in findings.replays]
    bars = axis.barh(names, rates, color=_COLOURS[0])
    axis.bar_label(bars, [f"{rate:.1%}" for rate in rates], padding=3)
    axis.invert_yaxis()
    axis.set(xlabel="prompt tokens from the cache", xlim=(0, 1))
    _percent(axis, "xaxis")


def _sweep(axis: Any, findings: Findings) -> None:
    by_policy: dict[str, list[tuple[int, float]]] = {}
    for point in findings.sweep:
        if point.replay.num_blocks is not None and point.replay.block_hit_rate is not None:
            by_policy.setdefault(point.replay.policy, []).append((point.replay.num_blocks, point.replay.block_hit_rate))
    for place, (policy, pairs) in enumerate(by_policy.items()):
        _line(axis, policy, *zip(*pairs, strict=True), place, marker="o", ms=3, ls="--" if policy == "optimal" else "-")
    infinite = findings.sweep[0].infinite.block_hit_rate
    if infinite is not None:
        axis.axhline(infinite, color="#999999", lw=1)
        axis.annotate("infinite cache", (0.01, infinite), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    axis.set(xscale="log", xlabel="capacity (blocks)", ylabel="block hit rate", ylim=(0, None))
    _percent(axis)


def _curve(axis: Any, findings: Findings) -> None:
    for place, curve in enumerate(findings.curves):
        capacities = [num_blocks for num_blocks in curve.capacities(200) if num_blocks]
        ratios = [curve.miss_ratio(num_blocks) or 0.0 for num_blocks in capacities]
        name = "exact" if curve.sampling_rate == 1.0 else f"sampled, {curve.sampling_rate:.0%} of conversations"
        _line(axis, name, capacities, ratios, place, ls="-" if place == 0 else "--")
    axis.set(xscale="log", xlabel="capacity (blocks)", ylabel="LRU miss ratio (blocks)", ylim=(0, 1))
    _percent(axis)


def _block_sizes(axis: Any, findings: Findings) -> None:
    sizes = [point.block_size for point in findings.block_sizes]
    lines = {
        "hits, whole blocks": [point.token_hit_rate for point in findings.block_sizes],
        "hits, exact": [point.exact_hit_rate for point in findings.block_sizes],
        "fragmentation": [point.fragmentation for point in findings.block_sizes],
    }
    for place, (name, rates) in enumerate(lines.items()):
        if all(rate is not None for rate in rates):
            _line(axis, name, sizes, rates, place, marker="o", ms=3)
    axis.set(xscale="log", xlabel="block size (tokens)", ylabel="share of tokens", ylim=(0, 1))
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    _percent(axis)


def _memory(axis: Any, uses: Sequence[MemoryUse]) -> None:
    for place, use in enumerate(uses):
        if use.course:
            hours = [time_s / 3600 for time_s, _, _ in use.course]
            tokens = [num_blocks * use.block_size / 1e6 for _, num_blocks, _ in use.course]
            _line(axis, use.allocator, hours, tokens, place, lw=1)
    axis.set(xlabel="time (hours)", ylabel="KV slots held (million tokens)", ylim=(0, None))


def _costs(axis: Any, findings: Findings) -> None:
    names = [point.place for point in findings.costs]
    bars = axis.barh(names, [point.mean_ttft_s for point in findings.costs], color=_COLOURS[0])
    axis.bar_label(bars, [f"{point.mean_ttft_s:.3f} s" for point in findings.costs], padding=3)
    axis.invert_yaxis()
    axis.set(xlabel="mean time to first token (s), no queueing", ylabel="where hits lie")


def _sources(axis: Any, findings: Findings) -> None:
    for record in findings.sources:
        within, across = record.within_tokens or 0, record.across_tokens or 0
        parts = {
            "same conversation": within,
            "other conversations": across,
            "computed": record.total_tokens - within - across,
        }
        left = 0.0
        for place, (name, num_tokens) in enumerate(parts.items()):
            share = num_tokens / record.total_tokens if record.total_tokens else 0.0
            axis.barh([""], [share], left=left, color=_COLOURS[place], label=f"{name}: {share:.1%}")
            left += share
    axis.set(xlabel="prompt tokens", xlim=(0, 1))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=3, frameon=False, fontsize=9)
    _percent(axis, "xaxis")


def _preemption(axis: Any, findings: Findings) -> None:
    names = [f"{record.victim}, {record.preemption}" for record in findings.preemption]
    bars = axis.barh(names, [record.finish_s for record in findings.preemption], color=_COLOURS[0])
    labels = [
        f"{record.recomputed_tokens:,} computed again, {record.swapped_tokens:,} swapped"
        for record in findings.preemption
    ]
    axis.bar_label(bars, labels, padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.5)
    axis.set(xlabel="time until all have ended (s); labels: tokens", ylabel="victim, way back")
