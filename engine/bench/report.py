"""What all benchmarks print: tables for people, then one JSON object that a script can keep.

The JSON object is `{"benchmark", "machine", "results"}`. Each result has `name`, `ours`, `peer` (null where nothing was
compared), `ratio` (ours / peer), `unit`, and whatever else the benchmark adds.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Result:
    """One measured quantity, beside one peer or none. Smaller is better unless the unit is a rate."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """ours / peer; None where there is no peer."""
        return self.ours / self.peer if self.peer else None

    def to_json(self) -> dict[str, Any]:
        """The result as the JSON object has it, numbers rounded to four digits."""
        return {
            "name": self.name,
            "ours": _rounded(self.ours),
            "peer": _rounded(self.peer),
            "peer_name": self.peer_name,
            "ratio": _rounded(self.ratio),
            "unit": self.unit,
            **{key: _rounded(value) for key, value in self.more.items()},
        }


@dataclass(frozen=True)
class Table:
    """A table for people: a title, the names of the columns, and the cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def machine() -> dict[str, Any]:
    """Where the numbers come from: CPU model, cores, Python, load average (1, 5, 15 minutes), commit (or None)."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "commit": _commit(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the working tree, with a + if it has been changed; None outside of one."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def print_report(
    benchmark: str,
    tables: Sequence[Table],
    results: Sequence[Result],
    *,
    only_json: bool = False,
    facts: dict[str, Any] | None = None,
    out: TextIO | None = None,
) -> None:
    """Prints the tables, unless `only_json`, and as the last line the JSON object. facts: what else that holds."""
    out = sys.stdout if out is None else out
    where = machine()
    if not only_json:
        load = "/".join(str(value) for value in where["load_average"] or ["?"])
        print(f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, load {load}", file=out)
        for table in tables:
            print_table(table, out)
        print(file=out)
    of_results = [result.to_json() for result in results]
    document = {"benchmark": benchmark, "machine": where, **(facts or {}), "results": of_results}
    print(json.dumps(document, ensure_ascii=False), file=out)


def print_table(table: Table, out: TextIO) -> None:
    """With rich on a terminal; as aligned text anywhere else."""
    if out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ModuleNotFoundError:
            pass
        else:
            rich = RichTable(title=table.title, title_justify="left")
            for index, column in enumerate(table.columns):
                rich.add_column(column, justify="right" if index else "left")
            for row in table.rows:
                rich.add_row(*row)
            Console(file=out).print(rich)
            return
    if not table.columns:
        print(f"\n{table.title}", file=out)
        return
    rows = [table.columns, *table.rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]
    print(f"\n{table.title}", file=out)
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([first, *rest]), file=out)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
