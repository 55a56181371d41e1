"""What runs in the process of one system: loads its adapter, answers jobs, keeps the time.

    python worker.py ADAPTER.py        jobs on stdin, one line of JSON each; an answer a line on stdout

Standard library only, and nothing of this project: the interpreter may be a peer's. Whatever a system prints itself
goes to stderr.

    {"do": "load", "settings": {...}}                 -> {"result": {"version", "load_s"}}
    {"do": "chat", "script": {...}, "together": true} -> {"result": {"turns": [[batch, ...], ...]}}
    {"do": "batch", "prompts": [...], ...}            -> {"result": batch}

or {"missing": "..."} where the system's package is not there, or {"error": "..."}. A batch is what `run_batch` returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Record = Callable[[int, Sequence[int]], None]


class Engine(Protocol):
    """A system that generates: greedy, and on past the end of the sequence. Made with the job's settings."""

    version: str

    def generate(
        self, prompts: list[list[int]], num_output_tokens: int, conversations: list[int] | None, record: Record
    ) -> list[int] | None:
        """Generates for all prompts together; how many tokens of each prompt were cached, None if it does not tell.

        conversations: which conversation each prompt continues; None: each is a new text. Calls `record(index, ids)`
        whenever the prompt of that index got new tokens.
        """

    def forget(self) -> None:
        """Empties all caches."""

    def close(self) -> None:
        """Ends what the engine started."""


# ---------------------------------------------------------------- clocks


class CpuClock:
    """On-CPU seconds of this process and of all its descendants that live when it is made.

    A system may compute in child processes. Their threads are read one by one, where Linux counts nanoseconds; without
    /proc this process counts alone.
    """

    def __init__(self) -> None:
        self._pids = _descendants(os.getpid())

    def __call__(self) -> float:
        """Seconds; only differences mean something."""
        of_children_ns = 0
        for pid in self._pids:
            for task in _directories(Path(f"/proc/{pid}/task")):
                try:
                    of_children_ns += int((task / "schedstat").read_text().split()[0])
                except OSError:  # it has just ended
                    continue
        return time.process_time() + of_children_ns / 1e9


def _directories(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.name.isdecimal()]
    except OSError:
        return []


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in _directories(Path("/proc")):
        try:
            # The second field is the name in parentheses, which may hold blanks; the parent is the second after it.
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(process.name))
    found = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


class Recorder:
    """Takes the tokens of a batch as they come, and the time of each prompt's first."""

    def __init__(self, num_prompts: int, cpu: CpuClock) -> None:
        self._cpu = cpu
        self.token_ids: list[list[int]] = [[] for _ in range(num_prompts)]
        self.first: list[tuple[float, float] | None] = [None] * num_prompts  # on the wall's and on the CPU's clock

    def __call__(self, index: int, token_ids: Sequence[int]) -> None:
        """New tokens for the prompt of this index."""
        if token_ids and self.first[index] is None:
            self.first[index] = (time.perf_counter(), self._cpu())
        self.token_ids[index] += token_ids


# ---------------------------------------------------------------- jobs


def run_batch(
    engine: Engine, prompts: list[list[int]], num_output_tokens: int, conversations: list[int] | None = None
) -> dict[str, Any]:
    """Generates for all prompts together. Times in seconds:

    cpu_s, wall_s             from submitting to the last output
    ttft_cpu_s, ttft_last_s   until all prompts have their first token
    ttft_s                    the median prompt's first token
    step_cpu_s, step_s        per step after that, until the end; null with one token of output

    and prompt_tokens, cached_tokens (null if the system does not tell), token_ids (of each output).
    """
    cpu = CpuClock()
    recorder = Recorder(len(prompts), cpu)
    start_s, start_cpu_s = time.perf_counter(), cpu()
    cached = engine.generate(prompts, num_output_tokens, conversations, recorder)
    end_cpu_s, end_s = cpu(), time.perf_counter()
    for index, token_ids in enumerate(recorder.token_ids):
        if len(token_ids) != num_output_tokens:
            raise RuntimeError(f"prompt {index} got {len(token_ids)} tokens, not {num_output_tokens}")
    firsts = [first for first in recorder.first if first is not None]
    last_s = max(wall_s for wall_s, _ in firsts)
    last_cpu_s = max(cpu_s for _, cpu_s in firsts)
    steps = num_output_tokens - 1
    return {
        "cpu_s": end_cpu_s - start_cpu_s,
        "wall_s": end_s - start_s,
        "ttft_cpu_s": last_cpu_s - start_cpu_s,
        "ttft_last_s": last_s - start_s,
        "ttft_s": statistics.median(wall_s for wall_s, _ in firsts) - start_s,
        "step_cpu_s": (end_cpu_s - last_cpu_s) / steps if steps else None,
        "step_s": (end_s - last_s) / steps if steps else None,
        "prompt_tokens": sum(map(len, prompts)),
        "cached_tokens": None if cached is None else sum(cached),
        "token_ids": recorder.token_ids,
    }


def run_chat(engine: Engine, script: dict[str, Any], together: bool) -> dict[str, Any]:
    """Plays the conversations turn by turn; the batches of each turn: one of all conversations, or one for each.

    A prompt is all that was said before, the answers as this very system gave them, and the next question.
    """
    engine.forget()
    histories = [list(script["system"]) for _ in script["users"]]
    turns = []
    for turn in range(len(script["users"][0])):
        prompts = [
            history + questions[turn] + script["before_answer"]
            for history, questions in zip(histories, script["users"], strict=True)
        ]
        everyone = list(range(len(prompts)))
        groups = [everyone] if together else [[index] for index in everyone]
        batches = [
            run_batch(engine, [prompts[index] for index in group], script["num_output_tokens"], group)
            for group in groups
        ]
        turns.append(batches)
        answers = [token_ids for batch in batches for token_ids in batch["token_ids"]]
        histories = [prompt + answer + script["after_answer"] for prompt, answer in zip(prompts, answers, strict=True)]
    return {"turns": turns}


def load(adapter: Path, settings: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """The adapter's engine. Raises ImportError if its system is not there."""
    start_s = time.perf_counter()
    spec = importlib.util.spec_from_file_location(f"adapter_{adapter.stem}", adapter)
    assert spec is not None and spec.loader is not None, f"{adapter} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    engine: Engine = module.Engine(settings)
    return engine, {"version": engine.version, "load_s": time.perf_counter() - start_s}


def main(adapter: Path) -> None:
    """Answers jobs until stdin ends."""
    # What a system prints, in Python or in C, must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The folder of this script would come before the peer's packages.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    engine: Engine | None = None
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any]
        try:
            if job["do"] == "load":
                engine, result = load(adapter, job["settings"])
            else:
                assert engine is not None, "the first job is to load"
                if job["do"] == "chat":
                    result = run_chat(engine, job["script"], job["together"])
                else:
                    engine.forget()
                    result = run_batch(engine, job["prompts"], job["num_output_tokens"])
            answer = {"result": result}
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if engine is not None:
        engine.close()
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # some systems leave threads behind that never end


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
