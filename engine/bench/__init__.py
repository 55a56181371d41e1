"""Benchmarks: programs that measure this project beside its peers and print tables and one line of JSON.

`BENCHMARKS` names the module of each subcommand of `radixkv bench`: its docstring says what is measured, and it has
`add_arguments(parser)` and `run_from_arguments(arguments)`.
"""

BENCHMARKS = {
    "tree": "engine.bench.tree",
    "scheduler": "engine.bench.scheduler",
    "attention": "engine.bench.attention",
    "chat": "engine.bench.chat",
}
