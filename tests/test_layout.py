"""The layout holds: imports point downwards, the cache needs no tensors, the command line starts without torch."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixkv

REPOSITORY = Path(__file__).resolve().parents[1]

# The rows of the Layout table in the design, finer where files of one row build on each other. A file or folder may
# import from smaller rows of its own package and from within its own folder. `__init__.py` of a package stands above
# all rows: it gathers the public names.
ROWS = {
    "radixkv": [
        ["errors", "arguments", "huge_pages"],
        ["tokens"],
        ["render"],  # low, so that a node and a block table can draw themselves; it knows them by what they offer
        ["pool", "node", "events", "stats"],
        ["tree", "block_table", "eviction"],
        ["cache"],
        ["baselines"],  # stands beside the cache: one table of constructors names all four managers
        ["film"],
        ["widget"],
        ["storage", "tiers", "snapshot"],
        ["traces"],
        ["workloads"],
        ["sim", "router"],
    ],
    "engine": [
        ["arguments", "config", "sampling_params", "beam_search", "logprobs", "errors"],
        ["request", "metrics", "detokenizer"],
        ["preemption", "stream"],
        ["scheduler"],
        ["batch"],
        ["attention"],
        ["models", "sampler", "swap"],
        ["runner"],
        ["core"],
        ["beams", "timed"],
        ["pressure"],
        ["plots"],
        ["llm"],
        ["async_llm"],
        ["chats"],
        ["replay", "bench", "server"],
        ["simulate", "show"],
        ["cli"],
    ],
}
TENSOR_FREE = [name for row in ROWS["radixkv"] for name in row if name not in {"storage", "tiers", "snapshot"}]


def source_files(package: str) -> list[Path]:
    """Every Python file of the package, relative to the repository, in a fixed order."""
    return sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / package).rglob("*.py"))


def imported_modules(file: Path) -> Iterator[str]:
    """The absolute dotted names of all imports in the file, also those inside functions.

    `from package import name` gives `package.name`: the name may be a module, and if it is not, the first parts still
    say where it comes from. Imports for type checkers count as well: a file that needs them cannot be read alone.
    """
    for statement in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"), filename=str(file))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            origin = list(file.parts[: len(file.parts) - statement.level]) if statement.level else []
            origin += statement.module.split(".") if statement.module else []
            yield from (".".join([*origin, alias.name]) for alias in statement.names)


def part_of(file: Path) -> str:
    """The file's or folder's name as the Layout table has it: `radixkv/tiers/host.py` belongs to `tiers`."""
    return file.parts[1].removesuffix(".py")


def modules_after(statement: str) -> set[str]:
    """The top-level names in `sys.modules` of a fresh interpreter that has run the statement."""
    program = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_the_cache_never_imports_the_engine() -> None:
    """The cache is usable alone, so what drives it must not leak into it."""
    wrong = [
        f"{file} imports {name}"
        for file in source_files("radixkv")
        for name in imported_modules(file)
        if name.split(".")[0] == "engine"
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(ROWS))
def test_imports_point_to_a_smaller_row(package: str) -> None:
    """A reader can take the files in the order of the table, and no two files need each other."""
    unplaced = {part_of(file) for file in source_files(package)} - {name for row in ROWS[package] for name in row}
    assert unplaced <= {"__init__", "__main__"}, f"give each a row in ROWS and in the design: {sorted(unplaced)}"
    row_of = {part: row for row, parts in enumerate(ROWS[package]) for part in parts}
    wrong = []
    for file in source_files(package):
        part = part_of(file)
        for name in imported_modules(file):
            origin, _, rest = name.partition(".")
            imported = rest.split(".")[0]
            if origin != package or part not in row_of or imported not in row_of or part == imported:
                continue
            if row_of[imported] >= row_of[part]:
                wrong.append(f"{file} (row {row_of[part]}) imports {name} (row {row_of[imported]})")
    assert not wrong


def test_tensor_free_modules_use_only_the_standard_library_and_sortedcontainers() -> None:
    """`pip install radixkv` brings one dependency, and only `storage` and the tiers may want more."""
    allowed = {*sys.stdlib_module_names, "sortedcontainers", "radixkv"}
    wrong = [
        f"{file} imports {name}"
        for file in source_files("radixkv")
        if part_of(file) in {"__init__", *TENSOR_FREE}
        for name in imported_modules(file)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_importing_radixkv_loads_neither_torch_nor_transformers_nor_numpy() -> None:
    """The cache serves routers and simulators on machines that have none of them, and it starts at once."""
    loaded = modules_after("import radixkv")
    assert "radixkv" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "engine"}


@pytest.mark.parametrize("statement", ["import engine.cli", "import engine.cli; engine.cli._build_parser()"])
def test_importing_the_command_line_loads_no_torch(statement: str) -> None:
    """`radixkv simulate` and `radixkv --help` work without torch, and answer before torch would have loaded."""
    loaded = modules_after(statement)
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers"}


def test_version_of_the_package_is_the_version_of_the_distribution() -> None:
    """The number stands in two files; a release must not change only one of them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert radixkv.__version__ == project["version"]
