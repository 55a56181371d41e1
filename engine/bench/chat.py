"""The engine beside its peers: chats that grow turn by turn, a grid of prompts and batches, and shared prompts.

    chat      8 conversations x 6 turns that share a system prompt of 512 tokens; questions of 40 tokens, answers of 32,
              greedy, past the end of the sequence. All conversations of a turn together
    single    one of these conversations again, one request in flight: TTFT, and decoding at batch 1. For ours also
              the time for as many tokens as were not cached, alone in an empty engine: the TTFT of a perfect cache
    grid      prompts of 128, 512 and 1,024 tokens at batch 1 and 8, nothing shared
    fanout    one prompt of 1,024 tokens x 2 to 64 continuations

Before anything else the floor is measured: a step must read the weights and the KV, which takes at least their bytes
over the memory's rate, and multiply, which takes at least its operations over the processor's rate (engine/bench/
floor.py). Every result is given as a share of it too; 100 % cannot be passed.

Each system runs in a process of its own with the same number of threads, all from the same token ids and weights; they
take turns, and medians count. Times are on the CPU's clock, over all processes and threads of a system, and on the
wall's; beside other work only the first means anything. A system that polls while it waits is not charged more CPU
time than it took on the wall, times its threads.

"same turns" counts answers equal to those of plain `transformers` in the same dtype: in float32 all should be, in
bfloat16 another batch shape already rounds otherwise.

A peer whose package is missing is named, with the line that adds it. Peers that pin other versions can live in an
environment of their own: --peer-python. LD_PRELOAD (tcmalloc, libiomp5) holds for all systems if it is set for the
command, and for one with --peer-env.

examples:
  radixkv bench chat                                       ours and transformers, under 20 minutes
  radixkv bench chat --quick                               everything once, at tiny sizes
  radixkv bench chat --phases chat single --dtypes bfloat16 --systems radixkv transformers
  radixkv bench chat --peer-python vllm=~/vllm/bin/python --peer-env vllm=LD_PRELOAD=libtcmalloc_minimal.so.4
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.arguments import positive
from engine.bench.chat_workload import PHASES, QUICK, Cell, Settings, Vocabulary, cells_of
from engine.bench.engines import OURS, REFERENCE, SOURCES, SYSTEMS, System
from engine.bench.engines.process import EngineProcess, SystemFailed
from engine.bench.floor import FAR_BEYOND_CACHES, ModelSize, Rates, decode_work
from engine.bench.report import Result, Table, print_report

DTYPES = ("float32", "bfloat16")
FLOOR = "floor"  # a phase of its own on the command line: without others, the floor alone is measured
UNCACHED = "radixkv, uncached tokens only"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How it is measured.

    model                a directory or hub id
    far_bytes            size of the buffer that no cache holds, for the memory's rate
    llm                  further arguments of `LLM`
    python, environment  of each source; gguf: of each dtype
    """

    model: str
    dtypes: tuple[str, ...] = DTYPES
    phases: tuple[str, ...] = PHASES
    systems: tuple[str, ...] = ()
    threads: int = 1
    rounds: int = 3
    minutes: float = 18.0
    kv_gib: int = 2
    num_blocks: int | None = None
    far_bytes: int = FAR_BEYOND_CACHES
    llm: dict[str, Any] = field(default_factory=dict)
    python: dict[str, str] = field(default_factory=dict)
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    gguf: dict[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """All that was measured.

    floors      by dtype
    cells       by dtype, in order
    quantities  by dtype, cell and system, each quantity once for every round; see `quantities_of`
    answers     of the chats, by dtype, cell and system: the token ids of each turn of each conversation
    versions    of the systems that ran
    failures    of each system that did not get to its end: dtype, name, why
    missing     peers whose package is not there
    """

    floors: dict[str, tuple[ModelSize, Rates]] = field(default_factory=dict)
    cells: dict[str, list[Cell]] = field(default_factory=dict)
    quantities: dict[tuple[str, str, str], dict[str, list[float]]] = field(default_factory=dict)
    answers: dict[tuple[str, str, str], list[list[int]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    missing: list[System] = field(default_factory=list)

    def add(self, dtype: str, cell: str, system: str, quantities: dict[str, float]) -> None:
        """Takes one round."""
        kept = self.quantities.setdefault((dtype, cell, system), {})
        for name, value in quantities.items():
            kept.setdefault(name, []).append(value)

    def median(self, dtype: str, cell: str, system: str, name: str) -> float | None:
        """Of a quantity, over the rounds; None where it was not measured."""
        values = self.quantities.get((dtype, cell, system), {}).get(name)
        return statistics.median(values) if values else None

    def same_turns(self, dtype: str, cell: str, system: str) -> int | None:
        """How many answers are those of plain transformers, token by token; None where one of them did not answer."""
        ours = self.answers.get((dtype, cell, system))
        reference = self.answers.get((dtype, cell, REFERENCE.name))
        if ours is None or reference is None:
            return None
        return sum(answer == expected for answer, expected in zip(ours, reference, strict=True))


# ---------------------------------------------------------------- measuring


def quantities_of(turns: list[list[dict[str, Any]]], threads: int, *, is_one_by_one: bool = False) -> dict[str, float]:
    """What a chat, or a batch as a chat of one turn, gave. Times in ms, each on the CPU's and on the wall's clock.

    output/CPU-s, output/s   tokens of output per second, prefills included
    hit rate                 share of the prompt tokens; not there if the system does not tell
    TTFT 1 CPU, TTFT 1       the first batch of turn 1, where nothing is cached: all its prompts' first tokens on the
                             CPU's clock, the median prompt's on the wall's
    TTFT CPU, TTFT           median over the batches of later turns
    step CPU, step           median over all batches; not for a batch that a system takes one by one
    """

    def cpu_s(batch: dict[str, Any], name: str, wall: str) -> float:
        return float(min(batch[name], threads * batch[wall]))

    batches = [batch for turn in turns for batch in turn]
    num_outputs = sum(len(token_ids) for batch in batches for token_ids in batch["token_ids"])
    quantities = {
        "output/CPU-s": num_outputs / sum(cpu_s(batch, "cpu_s", "wall_s") for batch in batches),
        "output/s": num_outputs / sum(batch["wall_s"] for batch in batches),
        "TTFT 1 CPU": 1e3 * cpu_s(batches[0], "ttft_cpu_s", "ttft_last_s"),
        "TTFT 1": 1e3 * batches[0]["ttft_s"],
    }
    if all(batch["cached_tokens"] is not None for batch in batches):
        num_cached = sum(batch["cached_tokens"] for batch in batches)
        quantities["hit rate"] = num_cached / sum(batch["prompt_tokens"] for batch in batches)
    later = [batch for turn in turns[1:] for batch in turn]
    if later:
        quantities["TTFT CPU"] = 1e3 * statistics.median(cpu_s(batch, "ttft_cpu_s", "ttft_last_s") for batch in later)
        quantities["TTFT"] = 1e3 * statistics.median(batch["ttft_s"] for batch in later)
    with_steps = [batch for batch in batches if batch["step_s"] is not None]
    if with_steps and not (is_one_by_one and len(batches[0]["token_ids"]) > 1):
        quantities["step CPU"] = 1e3 * statistics.median(cpu_s(batch, "step_cpu_s", "step_s") for batch in with_steps)
        quantities["step"] = 1e3 * statistics.median(batch["step_s"] for batch in with_steps)
    return quantities


def is_importable(system: System, python: str) -> bool:
    """Whether that interpreter finds the system's package, without loading it."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({system.module!r}) is None)"
    # Not from the current directory, in which a folder may have that name.
    return subprocess.run([python, "-c", probe], check=False, capture_output=True, cwd=os.sep).returncode == 0


def measure_floor(model: str, dtype: str, threads: int, far_bytes: int) -> tuple[ModelSize, Rates]:
    """The model's sizes and the machine's rates, measured in a process with these threads. Raises ValueError."""
    job = json.dumps({"model": model, "dtype": dtype, "threads": threads, "far_bytes": far_bytes})
    root = str(Path(__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-m", "engine.bench.floor", job],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": root},
    )
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or [f"status {ran.returncode}"]
        raise ValueError(f"the floor of {model} cannot be measured: {last[0]}")
    answer = json.loads(ran.stdout.splitlines()[-1])
    return ModelSize(**answer["size"]), Rates(**answer["rates"])


def measure(settings: Settings, options: Options, say: Say) -> Measured:
    """Measures everything, dtype by dtype. A system that fails is left out from there on.

    Each dtype has its share of the minutes: another round begins only where the last one of its kind suggests that it
    ends within them, and peers are taken through grid and fan-outs only while minutes last. Chats are played by all.
    """
    start_s = time.monotonic()
    measured = Measured()
    systems = _present(options, measured, say)
    vocabulary = Vocabulary.of(options.model)
    for number, dtype in enumerate(options.dtypes):
        say(f"{dtype}: floor")
        measured.floors[dtype] = measure_floor(options.model, dtype, options.threads, options.far_bytes)
        cells = measured.cells[dtype] = list(cells_of(settings, vocabulary, options.phases))
        if cells:
            deadline_s = start_s + 60 * options.minutes * (number + 1) / len(options.dtypes)
            with _Run(dtype, settings, options, measured, say) as run:
                for system in systems:
                    run.start(system, vocabulary)
                run.measure(cells, deadline_s)
    return measured


def _present(options: Options, measured: Measured, say: Say) -> list[System]:
    """The systems that were asked for and are there; the others are noted, and said."""
    names = options.systems or tuple(system.name for system in SYSTEMS.values() if system.by_default)
    present = []
    for system in map(SYSTEMS.__getitem__, names):
        if not system.source or is_importable(system, options.python.get(system.source, sys.executable)):
            present.append(system)
        else:
            measured.missing.append(system)
            say(f"without {system.name}: {system.add}")
    return present


class _Run:
    """All systems in one dtype, alive side by side; leaving the context ends them."""

    def __init__(self, dtype: str, settings: Settings, options: Options, measured: Measured, say: Say) -> None:
        self._dtype = dtype
        self._settings = settings
        self._options = options
        self._measured = measured
        self._say = say
        self._processes: dict[str, EngineProcess] = {}
        self._made_gguf: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, system: System, vocabulary: Vocabulary) -> None:
        """Starts a system and warms it up, or notes why not."""
        options, settings, dtype = self._options, self._settings, self._dtype
        self._say(f"{dtype}: loading {system.name}")
        size, _ = self._measured.floors[dtype]
        try:
            process = EngineProcess(
                system,
                options.python.get(system.source, sys.executable),
                options.threads,
                options.environment.get(system.source, {}),
            )
            self._stack.callback(process.close)
            self._processes[system.name] = process
            job = {
                "model": options.model,
                "dtype": dtype,
                "threads": options.threads,
                "argument": system.argument,
                "kv_gib": options.kv_gib,
                "num_kv_tokens": min(options.kv_gib * 2**30 // size.kv_bytes_per_token, settings.max_kv_tokens),
                "num_blocks": options.num_blocks,
                "llm": options.llm,
                "max_batch": settings.max_batch,
                "max_model_len": settings.max_model_len,
                "conversations": settings.conversations,
                "gguf": self._gguf() if system.source == "llamacpp" else None,
            }
            self._measured.versions[system.name] = process.ask({"do": "load", "settings": job})["version"]
            for batch in (1, settings.conversations):
                prompts = [vocabulary.text(12, random.Random(f"warm up/{index}")) for index in range(batch)]
                process.ask({"do": "batch", "prompts": prompts, "num_output_tokens": 4})
        except (SystemFailed, ValueError, OSError) as error:
            self._fail(system.name, error)

    def _gguf(self) -> str:
        """The model as a GGUF file in this dtype: the one that was given, or one made now, which lives as long as this.

        Raises ValueError if it cannot be made.
        """
        given = self._options.gguf.get(self._dtype)
        if given is None and self._made_gguf is None:
            from engine.bench.gguf_file import write_gguf

            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="radixkv-bench-"))
            self._made_gguf = str(Path(directory) / f"{self._dtype}.gguf")
            write_gguf(Path(self._options.model), Path(self._made_gguf), self._dtype)
        return given or str(self._made_gguf)

    def measure(self, cells: list[Cell], deadline_s: float) -> None:
        """Rounds over all cells and systems."""
        took_s: dict[tuple[str, str], float] = {}
        for number in range(self._options.rounds):
            for cell in cells:
                for name in list(self._processes):
                    system = SYSTEMS[name]
                    if (cell.phase == "grid" and not system.with_grid) or (
                        cell.phase == "fanout" and cell.width > system.max_fanout
                    ):
                        continue
                    begun_s = time.monotonic()
                    is_late = begun_s + took_s.get((cell.name, name), 0.0) > deadline_s
                    is_wanted = number == 0 and (name == OURS.name or cell.job["do"] == "chat")
                    if is_late and not is_wanted:
                        self._say(f"{self._dtype}, {cell.name}, round {number + 1}: no time left for {name}")
                        continue
                    self._say(f"{self._dtype}, {cell.name}, round {number + 1}: {name}")
                    self._measure_cell(cell, system, is_first=number == 0)
                    took_s[cell.name, name] = time.monotonic() - begun_s

    def _measure_cell(self, cell: Cell, system: System, *, is_first: bool) -> None:
        process = self._processes[system.name]
        try:
            result = process.ask(cell.job)
            turns = result["turns"] if cell.job["do"] == "chat" else [[result]]
            quantities = quantities_of(turns, self._options.threads, is_one_by_one=system.is_one_by_one)
            if cell.phase == "single" and system.name == OURS.name and len(turns) > 1:
                self._measured.add(self._dtype, cell.name, UNCACHED, self._uncached_alone(process, cell, turns))
        except SystemFailed as error:
            self._fail(system.name, error)
            return
        self._measured.add(self._dtype, cell.name, system.name, quantities)
        if cell.job["do"] == "chat" and is_first:
            self._measured.answers[self._dtype, cell.name, system.name] = [
                answer for turn in turns for batch in turn for answer in batch["token_ids"]
            ]

    def _uncached_alone(self, process: EngineProcess, cell: Cell, turns: list[Any]) -> dict[str, float]:
        """Prompts with as many tokens as had to be computed on the later turns, each in an engine whose cache is empty.

        The TTFT on the first turn is left out: the whole prompt is computed there.
        """
        system = cell.job["script"]["system"]
        alone = []
        for batch in (batch for turn in turns[1:] for batch in turn):
            num_tokens = batch["prompt_tokens"] - batch["cached_tokens"]
            prompt = (system * (num_tokens // len(system) + 1))[:num_tokens]
            alone.append([process.ask({"do": "batch", "prompts": [prompt], "num_output_tokens": 1})])
        quantities = quantities_of([alone[0], *alone], self._options.threads)
        return {name: quantities[name] for name in ("TTFT CPU", "TTFT")}

    def _fail(self, name: str, error: Exception) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.close()  # at once: one that hangs would take the time of the others
        self._measured.failures.append((self._dtype, name, str(error)))
        self._say(f"{self._dtype}: without {name} from here on: {error}")


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class _Quantity:
    """How a quantity is shown."""

    unit: str
    more_is_better: bool = False
    decimals: int = 0


_QUANTITIES = {
    "output/CPU-s": _Quantity("tokens/CPU-s", True, 1),
    "output/s": _Quantity("tokens/s", True, 1),
    "hit rate": _Quantity("share", True, 3),
    "TTFT 1 CPU": _Quantity("ms"),
    "TTFT 1": _Quantity("ms"),
    "TTFT CPU": _Quantity("ms"),
    "TTFT": _Quantity("ms"),
    "step CPU": _Quantity("ms", decimals=1),
    "step": _Quantity("ms", decimals=1),
}
# Columns by phase. Where a quantity has a floor, its share of that stands in parentheses.
_COLUMNS = {
    "chat": ("output/CPU-s", "output/s", "hit rate", "TTFT 1 CPU", "TTFT CPU", "TTFT", "step CPU", "step"),
    "single": ("hit rate", "TTFT 1 CPU", "TTFT 1", "TTFT CPU", "TTFT", "step CPU", "step"),
    "grid": ("TTFT 1 CPU", "TTFT 1", "step CPU", "step"),
    "fanout": ("output/CPU-s", "output/s", "hit rate", "TTFT 1 CPU", "step CPU", "step"),
}
# Ratios in the tables, by phase; the JSON has those of all columns.
_RATIOS = {
    "chat": ("output/CPU-s", "TTFT CPU", "step CPU"),
    "single": ("TTFT CPU", "step CPU"),
    "grid": ("TTFT 1 CPU", "step CPU"),
    "fanout": ("output/CPU-s", "TTFT 1 CPU", "step CPU"),
}
_TITLES = {
    "chat": "all conversations of a turn together",
    "single": "one request in flight",
    "grid": "nothing shared",
    "fanout": "one prompt, continued several times",
}


def floors_of(cell: Cell, size: ModelSize, rates: Rates) -> dict[str, float]:
    """What quantities can be at best: ms at least, or tokens per CPU-second at most."""
    total_s = cell.prefill.floor_s(size, rates) + cell.num_steps * cell.step.floor_s(size, rates)
    floors = {
        "output/CPU-s": cell.num_outputs / total_s,
        "TTFT 1 CPU": 1e3 * cell.cold.floor_s(size, rates),
        "step CPU": 1e3 * cell.step.floor_s(size, rates),
    }
    if cell.later is not None:
        floors["TTFT CPU"] = 1e3 * cell.later.floor_s(size, rates)
    return floors


def share_of_floor(name: str, value: float | None, floors: dict[str, float]) -> float | None:
    """How near a quantity comes to its floor, 1 at best; None where it has none or was not measured."""
    if name not in floors or not value:
        return None
    return value / floors[name] if _QUANTITIES[name].more_is_better else floors[name] / value


def summarize(measured: Measured) -> tuple[list[Table], list[Result]]:
    """Tables for people and results for scripts."""
    tables: list[Table] = []
    results: list[Result] = []
    for dtype, (size, rates) in measured.floors.items():
        of_floor = _floor_results(dtype, size, rates)
        results += of_floor
        rows: list[tuple[str, ...]] = [(result.name, f"{result.ours:,.1f}", result.unit) for result in of_floor]
        tables.append(Table(f"{dtype}: the floor", ("", "measured", "unit"), rows))
        for phase in PHASES:
            of_phase = [cell for cell in measured.cells[dtype] if cell.phase == phase]
            rows = []
            for cell in of_phase:
                floors = floors_of(cell, size, rates)
                rows += _rows(measured, dtype, cell, floors)
                results += _results(measured, dtype, cell, floors)
            if rows:
                ratios = [f"ratio {name}" for name in _RATIOS[phase]]
                same = ["same turns"] if of_phase[0].job["do"] == "chat" else []
                columns = ("", *_COLUMNS[phase], *ratios, *same)
                title = f"{dtype}: {phase}, {_TITLES[phase]} (ms; share of the floor; ratio: ours / the other's)"
                tables.append(Table(title, columns, rows))
    versions: list[tuple[str, ...]] = [
        (name, version, SYSTEMS[name].about) for name, version in measured.versions.items()
    ]
    tables.append(Table("Systems", ("", "version", "what it does"), versions))
    tables += [Table(f"Not there: {peer.name}. To add it: {peer.add}", (), []) for peer in measured.missing]
    tables += [Table(f"Failed: {name} in {dtype}: {why}", (), []) for dtype, name, why in measured.failures]
    return tables, results


def _floor_results(dtype: str, size: ModelSize, rates: Rates) -> list[Result]:
    """What the floor is made of, and as an example that of a step."""
    more: dict[str, Any] = {"dtype": dtype, "phase": FLOOR}
    buffer_mib = rates.buffer_bytes / 2**20
    reading = f"memory rate, {rates.reading} of {buffer_mib:,.0f} MiB"
    step_ms = 1e3 * decode_work([512]).floor_s(size, rates)
    return [
        Result(reading, rates.bytes_per_s / 1e9, "GB/CPU-s", more={**more, "buffer_bytes": rates.buffer_bytes}),
        Result("product rate, matrices of 1,024", rates.operations_per_s / 1e9, "Gop/CPU-s", more=more),
        Result("weights that a step reads", size.weight_bytes / 1e6, "MB", more=more),
        Result("KV of a token", size.kv_bytes_per_token / 1e3, "kB", more=more),
        Result("floor of a step, batch 1, context 512", step_ms, "ms", more=more),
    ]


def _rows(measured: Measured, dtype: str, cell: Cell, floors: dict[str, float]) -> list[tuple[str, ...]]:
    """A row for each system that was measured in this cell."""
    rows = []
    for of_dtype, of_cell, name in measured.quantities:
        if (of_dtype, of_cell) != (dtype, cell.name):
            continue
        row = [name if cell.job["do"] == "chat" else f"{cell.name}: {name}"]
        for column in _COLUMNS[cell.phase]:
            value = measured.median(dtype, cell.name, name, column)
            share = share_of_floor(column, value, floors)
            text = "" if value is None else f"{value:,.{_QUANTITIES[column].decimals}f}"
            row.append(text if share is None else f"{text} ({share:.0%})")
        for column in _RATIOS[cell.phase]:
            ours = measured.median(dtype, cell.name, OURS.name, column)
            value = measured.median(dtype, cell.name, name, column)
            row.append("" if name == OURS.name or ours is None or not value else f"{ours / value:.2f}")
        if cell.job["do"] == "chat":
            same = measured.same_turns(dtype, cell.name, name)
            num_answers = len(measured.answers.get((dtype, cell.name, name), ()))
            row.append("" if same is None else f"{same}/{num_answers}")
        rows.append(tuple(row))
    return rows


def _results(measured: Measured, dtype: str, cell: Cell, floors: dict[str, float]) -> list[Result]:
    """Every quantity of ours, beside each peer that has it, and alone where none has."""
    others = [
        name
        for of_dtype, of_cell, name in measured.quantities
        if (of_dtype, of_cell) == (dtype, cell.name) and name != OURS.name
    ]
    results = []
    for quantity in _COLUMNS[cell.phase]:
        ours = measured.median(dtype, cell.name, OURS.name, quantity)
        if ours is None:
            continue
        more = {"dtype": dtype, "phase": cell.phase, "share_of_floor": share_of_floor(quantity, ours, floors)}
        values = {name: measured.median(dtype, cell.name, name, quantity) for name in others}
        beside = {name: value for name, value in values.items() if value is not None}
        for name, value in beside.items() or [(None, None)]:
            peer_share = share_of_floor(quantity, value, floors)
            results.append(
                Result(
                    f"{cell.name}: {quantity}",
                    ours,
                    _QUANTITIES[quantity].unit,
                    value,
                    name,
                    {**more, "peer_share_of_floor": peer_share},
                )
            )
    for name in (OURS.name, *others):
        same = measured.same_turns(dtype, cell.name, name)
        if same is not None and name != REFERENCE.name:
            of_turns = len(measured.answers[dtype, cell.name, name])
            more = {"dtype": dtype, "phase": cell.phase, "system": name, "of_turns": of_turns}
            results.append(Result(f"{cell.name}: same turns", same, "turns", more=more))
    return results


# ---------------------------------------------------------------- the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv bench chat`."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", metavar="M", default="smollm2-135m", help="default: %(default)s, the demo model")
    what.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="D", help="default: both")
    what.add_argument(
        "--phases", nargs="+", choices=(*PHASES, FLOOR), metavar="PHASE", help=f"of {', '.join((*PHASES, FLOOR))}"
    )
    what.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), metavar="S", help=f"of {', '.join(SYSTEMS)}")
    what.add_argument("--quick", action="store_true", help="one round at tiny sizes, to see whether all works")
    defaults = Settings()
    for name in ("conversations", "turns", "system_tokens", "user_tokens", "output_tokens"):
        option = f"--{name.replace('_', '-')}"
        what.add_argument(option, metavar="N", type=positive, help=f"of the chat (default: {getattr(defaults, name)})")
    how = parser.add_argument_group("how")
    how.add_argument("--threads", metavar="N", type=positive, default=1, help="of each system (default: %(default)s)")
    how.add_argument("--rounds", metavar="N", type=positive, default=3, help="at most (default: %(default)s)")
    how.add_argument(
        "--minutes",
        metavar="N",
        type=positive,
        default=18,
        help="begin nothing that can be left out when it would end later (default: %(default)s)",
    )
    how.add_argument("--kv-gib", metavar="N", type=positive, default=2, help="KV of each system (default: %(default)s)")
    how.add_argument("--json", action="store_true", help="print the JSON object without the tables")
    ours = parser.add_argument_group("ours")
    ours.add_argument("--num-blocks", metavar="N", type=positive, help="blocks in the pool, instead of --kv-gib")
    ours.add_argument("--attention", metavar="A", help="as `LLM` takes it")
    ours.add_argument("--model-impl", metavar="I", help="as `LLM` takes it")
    peers = parser.add_argument_group("peers", f"NAME is one of {', '.join(SOURCES)}.")
    peers.add_argument(
        "--peer-python",
        metavar="NAME=PYTHON",
        action="append",
        default=[],
        type=_peer_python,
        help="the interpreter of an environment that has the peer",
    )
    peers.add_argument(
        "--peer-env",
        metavar="NAME=VARIABLE=VALUE",
        action="append",
        default=[],
        type=_peer_environment,
        help="an environment variable of that peer's process",
    )
    peers.add_argument(
        "--gguf",
        metavar="DTYPE=FILE",
        action="append",
        default=[],
        type=_gguf,
        help="the model for llama.cpp; without it, it is converted from --model",
    )


def _named(text: str, names: Sequence[str], form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in names or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form} with the first one of {', '.join(names)}")
    return name, value


def _peer_python(text: str) -> tuple[str, str]:
    name, value = _named(text, SOURCES, "NAME=PYTHON")
    path = Path(value).expanduser().absolute()  # not resolved: an environment's Python is often a link to another's
    if not path.is_file() or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{value!r} is not a Python interpreter: there is no such program")
    return name, str(path)


def _peer_environment(text: str) -> tuple[str, str, str]:
    name, rest = _named(text, SOURCES, "NAME=VARIABLE=VALUE")
    variable, equals, value = rest.partition("=")
    if not equals or not variable:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VARIABLE=VALUE")
    return name, variable, value


def _gguf(text: str) -> tuple[str, str]:
    dtype, value = _named(text, DTYPES, "DTYPE=FILE")
    path = Path(value).expanduser().absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{value!r} is not a file")
    return dtype, str(path)


def options_from(arguments: argparse.Namespace) -> tuple[Settings, Options]:
    """Sizes and options as the arguments give them; what is not given stays as it is by default."""
    sizes = ("conversations", "turns", "system_tokens", "user_tokens", "output_tokens")
    given = {name: getattr(arguments, name) for name in sizes if getattr(arguments, name) is not None}
    settings = replace(QUICK if arguments.quick else Settings(), **given)
    settings = replace(settings, single_conversations=min(settings.single_conversations, settings.conversations))
    environment: dict[str, dict[str, str]] = {}
    for name, variable, value in arguments.peer_env:
        environment.setdefault(name, {})[variable] = value
    phases = tuple(phase for phase in PHASES if arguments.phases is None or phase in arguments.phases)
    return settings, Options(
        model=_directory_of(arguments.model),
        dtypes=tuple(dict.fromkeys(arguments.dtypes)),
        phases=phases,
        systems=tuple(dict.fromkeys(arguments.systems or ())),
        threads=arguments.threads,
        rounds=1 if arguments.quick else arguments.rounds,
        minutes=arguments.minutes,
        kv_gib=arguments.kv_gib,
        num_blocks=arguments.num_blocks,
        far_bytes=1 << 26 if arguments.quick else FAR_BEYOND_CACHES,
        llm={name: getattr(arguments, name) for name in ("attention", "model_impl") if getattr(arguments, name)},
        python=dict(arguments.peer_python),
        environment=environment,
        gguf=dict(arguments.gguf),
    )


def _directory_of(model: str) -> str:
    """The model as every system can load it: the demo model's name is known to ours alone."""
    from engine.models.smollm2 import DEMO_MODEL, demo_model_directory

    return str(demo_model_directory()) if model == DEMO_MODEL else model


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv bench chat`: progress on stderr, tables and one line of JSON on stdout.

    Raises ValueError at the end, with everything printed, if it was ours that failed.
    """
    settings, options = options_from(arguments)
    measured = measure(settings, options, lambda line: print(line, file=sys.stderr, flush=True))
    tables, results = summarize(measured)
    facts = {
        "threads": options.threads,
        "versions": measured.versions,
        "missing": {peer.name: peer.add for peer in measured.missing},
        "failures": [dict(zip(("dtype", "system", "why"), failure, strict=True)) for failure in measured.failures],
    }
    print_report("chat", tables, results, only_json=arguments.json, facts=facts)
    for _, name, why in measured.failures:
        if name == OURS.name:
            raise ValueError(f"{name} failed: {why}")
