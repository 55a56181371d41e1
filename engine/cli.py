"""The console script `radixkv`: arguments in, a table or JSON on stdout, progress and errors on stderr.

Importing this module loads no torch: a command imports what it needs when it runs, so that `--help` is instant and
commands that need no model work without one. A command is a function that adds its arguments, a function that runs, and
an entry in `COMMANDS`.

Exit status: 0, 1 after a broken pipe, 2 for bad input (with one line on stderr), 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine import show, simulate
from engine.arguments import at_least, positive
from engine.bench import BENCHMARKS
from engine.chats import FORMATS, builtin_chats, read_chats
from engine.config import ATTENTIONS, MODEL_IMPLS
from engine.errors import EngineError
from engine.replay import HISTORIES
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from engine.replay import TurnRecord
    from radixkv.film import Recording

# What says that what was given cannot be used; any other exception is a bug and shows its traceback.
_INPUT_ERRORS = (ValueError, OSError, EngineError, RadixKVError)
_PACKAGES_OF_THIS_PROJECT = ("radixkv", "engine")
_PLAIN_WIDTH = 132  # columns of a table that goes to a file or a pipe, wide enough for a row of `replay --compare`


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: one line for the list of commands, its arguments, its examples, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    examples: str


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command line `argv` (without the program's name; `sys.argv` if None)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character gets a question mark in its place, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        arguments = _build_parser().parse_args(argv)
    except SystemExit as stop:  # how argparse ends after --help, --version and errors
        return stop.code if isinstance(stop.code, int) else 2
    prog = f"radixkv {arguments.command}"
    try:
        COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone. Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _PACKAGES_OF_THIS_PROJECT:
            raise
        extra = "plots" if package == "matplotlib" else "engine"
        print(f'{prog}: error: {package} is not installed: pip install "radixkv[{extra}]"', file=sys.stderr)
        return 2
    except _INPUT_ERRORS as error:
        print(f"{prog}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="radixkv",
        description="A radix prefix cache for the keys and values of language models, and a decoder that lives on it.",
        epilog="examples:\n" + "\n".join(command.examples for command in COMMANDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"radixkv {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog="examples:\n" + command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
    return parser


def _version() -> str:
    try:
        return metadata.version("radixkv")
    except metadata.PackageNotFoundError:
        return "(not installed)"


# replay ---------------------------------------------------------------------------------------------------------------


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    chats = parser.add_argument_group("what is said")
    chats.add_argument(
        "--chats",
        metavar="FILE",
        action="append",
        help="conversations to play instead of the built-in ones; give it twice to read questions and answers together",
    )
    chats.add_argument("--format", choices=FORMATS, default="auto", help="format of the files (default: %(default)s)")
    chats.add_argument("--turns", metavar="N", type=positive, help="play at most the first N turns of each")
    chats.add_argument("--conversations", metavar="N", type=positive, help="play the first N conversations only")
    chats.add_argument(
        "--history",
        choices=HISTORIES,
        default="generated",
        help="continue with the model's own replies or with those in the file (default: %(default)s)",
    )
    model = parser.add_argument_group("model and cache")
    model.add_argument(
        "--model",
        metavar="M",
        default="smollm2-135m",
        help="a hub id, a local directory, or the demo model's name (default: %(default)s)",
    )
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    model.add_argument("--device", default="cpu", help="such as cpu, cuda, or auto (default: %(default)s)")
    model.add_argument(
        "--model-impl",
        choices=MODEL_IMPLS,
        default="auto",
        help="how the model is run (default: native where it can be)",
    )
    model.add_argument(
        "--attention", choices=ATTENTIONS, default="auto", help="how shared KV is read (default: once where that pays)"
    )
    model.add_argument("--threads", metavar="N", type=positive, help="threads that torch may use")
    model.add_argument("--block-size", metavar="N", type=positive, default=16, help="tokens a block (default: 16)")
    size = model.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", metavar="N", type=positive, help="blocks in the pool")
    size.add_argument("--kv-cache-memory", metavar="SIZE", help="size of the pool instead (default: 2GiB)")
    model.add_argument("--policy", default="lru", help="which leaf to evict first (default: %(default)s)")
    run = parser.add_argument_group("how it runs")
    run.add_argument("--max-tokens", metavar="N", type=positive, default=32, help="tokens a reply (default: 32)")
    run.add_argument("--ignore-eos", action="store_true", help="let every reply run to --max-tokens")
    run.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    run.add_argument("--top-p", metavar="P", type=float, default=1.0, help="default: 1, which keeps all tokens")
    run.add_argument("--top-k", metavar="K", type=at_least(0), default=0, help="default: 0, which keeps all tokens")
    run.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default: 0)")
    run.add_argument(
        "--concurrency",
        metavar="N",
        type=positive,
        default=1,
        help="conversations of one wave that are submitted together (default: 1: TTFT is one request's own time)",
    )
    run.add_argument("--compare", action="store_true", help="run every prompt again with caching off")
    run.add_argument("--report", metavar="FILE", type=Path, help="write a page that plays the life of the cache")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _run_replay(arguments: argparse.Namespace) -> None:
    if arguments.report is not None:
        show.check_place(arguments.report, "--report")
    # The chats first: a mistake in them should not cost the loading of a model.
    conversations = list(read_chats(arguments.chats, arguments.format) if arguments.chats else builtin_chats())
    conversations = conversations[: arguments.conversations]
    if arguments.turns is not None:
        conversations = [conversation.shortened(arguments.turns) for conversation in conversations]

    from rich.console import Console

    from engine import LLM, SamplingParams
    from engine.replay import page_of, print_report, replay
    from radixkv.film import Recording

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    pool: dict[str, Any] = {}
    if arguments.num_blocks is not None:
        pool["num_blocks"] = arguments.num_blocks
    if arguments.kv_cache_memory is not None:
        pool["kv_cache_memory"] = arguments.kv_cache_memory
    stderr = Console(stderr=True)
    stderr.print(f"loading {arguments.model}", markup=False, highlight=False, soft_wrap=True)
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        model_impl=arguments.model_impl,
        attention=arguments.attention,
        block_size=arguments.block_size,
        policy=arguments.policy,
        max_num_seqs=arguments.concurrency,
        **pool,
    )
    # Calls are noted and drawn afterwards: drawing in between would count as time to the first token.
    recording = Recording(llm.cache) if arguments.report is not None else None
    num_turns = sum(len(conversation.turns) for conversation in conversations)
    with recording or nullcontext(), _replay_progress(num_turns, stderr) as on_turn:
        report = replay(
            llm,
            conversations,
            params,
            history=arguments.history,
            concurrency=arguments.concurrency,
            compare=arguments.compare,
            on_turn=on_turn,
            on_batch=None if recording is None else partial(_begin_chapter, recording),
        )
    if not report.turns:
        raise ValueError(f"no turn could be played: {report.remarks[0]}")
    if recording is not None:
        page = page_of(report, recording.film())
        arguments.report.write_text(page, encoding="utf-8")
        stderr.print(f"wrote {arguments.report}", markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        is_plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        print_report(report, Console(width=_PLAIN_WIDTH if is_plain else None))


def _begin_chapter(recording: Recording, turn: int, names: Sequence[str]) -> None:
    recording.chapter(f"{', '.join(names)}, turn {turn}")


@contextmanager
def _replay_progress(num_turns: int, stderr: Any) -> Iterator[Callable[[TurnRecord], None]]:
    """What to call after each turn: it moves a bar on a terminal, and writes a line a wave anywhere else."""
    if stderr.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=stderr, transient=True) as progress:
            task = progress.add_task("replaying", total=num_turns)
            yield lambda record: progress.advance(task)
    else:
        last_turn = 0

        def write_wave(record: TurnRecord) -> None:
            nonlocal last_turn
            if record.turn != last_turn:
                last_turn = record.turn
                stderr.print(f"replaying turn {record.turn}", highlight=False)

        yield write_wave


# bench ----------------------------------------------------------------------------------------------------------------


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, module_name in BENCHMARKS.items():
        module = import_module(module_name)
        description = module.__doc__ or ""
        subparser = benchmarks.add_parser(
            name,
            help=description.partition("\n")[0].rstrip("."),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(subparser)


def _run_bench(arguments: argparse.Namespace) -> None:
    import_module(BENCHMARKS[arguments.benchmark]).run_from_arguments(arguments)


COMMANDS = {
    "replay": Command(
        help="play conversations turn by turn and show what the prefix cache saves",
        add_arguments=_add_replay_arguments,
        run=_run_replay,
        examples="""\
  radixkv replay                                       the built-in chats on the demo model
  radixkv replay --compare                             ... and the same prompts with caching off
  radixkv replay --compare --report replay.html        ... and a page that plays the life of the cache
  radixkv replay --chats my_chats.jsonl --turns 3      your own conversations, three turns of each
  radixkv replay --chats oasst.jsonl.gz --conversations 20 --history recorded --json
  radixkv replay --model path/to/model --dtype bfloat16 --block-size 32 --concurrency 4""",
    ),
    "simulate": Command(
        help="play a trace of requests against the cache: hit rates, capacities, policies, memory, costs",
        add_arguments=simulate.add_arguments,
        run=simulate.run_from_arguments,
        examples=simulate.EXAMPLES,
    ),
    "show": Command(
        help="play chats or a trace without a model and show the tree; --html writes a page that plays its life",
        add_arguments=show.add_arguments,
        run=show.run_from_arguments,
        examples=show.EXAMPLES,
    ),
    "bench": Command(
        help="measure this project beside its peers, where those are installed",
        add_arguments=_add_bench_arguments,
        run=_run_bench,
        examples="""\
  radixkv bench tree                                   what a request costs the scheduler, without any model
  radixkv bench tree --only workload --block-sizes 16 --no-peers
  radixkv bench tree --peer-path sglang=path/to/unpacked/wheel --json
  radixkv bench scheduler                              preemption and order of admission, on a clock of their own
  radixkv bench attention                              what reading shared KV once saves
  radixkv bench chat                                   the engine beside transformers, vLLM and llama.cpp
  radixkv bench chat --quick                           ... everything once, at tiny sizes""",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
