"""`radixkv simulate` end to end, plots and pressure included. No torch; the numbers are test_sim.py's business."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.plots import Findings, draw
from engine.pressure import preemption_pressure
from radixkv.traces import load

REPOSITORY = Path(__file__).resolve().parents[2]

ROWS = [
    {"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 3]},
    {"timestamp": 900, "input_length": 600, "output_length": 10, "hash_ids": [1, 9]},
    {"timestamp": 2000, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 3]},
]
HITS = [0, 2, 1, 3]


@pytest.fixture
def trace(tmp_path):
    """Four requests in Mooncake's format."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def run(capsys, *argv):
    """What the command prints; it must succeed."""
    status = main(["simulate", *map(str, argv)])
    out = capsys.readouterr()
    assert status == 0, out.err
    return out.out


def run_json(capsys, *argv):
    """The JSON object that the command prints."""
    return json.loads(run(capsys, *argv, "--json"))


def test_the_json_is_what_scripts_rely_on(capsys, trace):
    """Names and meanings are public: null is infinite for a capacity, and unknown for a rate."""
    document = run_json(capsys, trace, "--num-blocks", 3, "inf", "--per-request", "--policy", "lru", "optimal")
    assert document["trace"] == "trace" and document["definition"].startswith("Mooncake")
    assert [(r["policy"], r["num_blocks"]) for r in document["results"]] == [
        ("lru", 3), ("lru", None), ("optimal", 3), ("optimal", None),
    ]  # fmt: skip
    result = document["results"][1]
    assert (result["allocator"], result["requests"]) == ("radix", 4)
    assert (result["total_blocks"], result["hit_blocks"]) == (10, 6)
    assert result["block_hit_rate"] == 0.6
    assert (result["total_tokens"], result["hit_tokens"]) == (3684, 1024 + 512 + 1030)
    assert result["token_hit_rate"] == pytest.approx(2566 / 3684)
    assert result["per_request_hit_blocks"] == HITS
    assert result["evicted_blocks"] == 0 and result["seconds"] >= 0


def test_a_table_says_its_definition(capsys, trace):
    """A number without its definition is an opinion."""
    out = run(capsys, trace)
    assert "60.00%" in out and "infinite" in out
    assert "Definition: Mooncake" in out and "prompt blocks only" in out


def test_without_prefix_identity_a_rate_is_not_available_and_never_zero(capsys, tmp_path):
    """Azure's traces have lengths only."""
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n", encoding="utf-8")
    out = run(capsys, path)
    assert "not available" in out and "0.00%" not in out
    (result,) = run_json(capsys, path)["results"]
    assert result["token_hit_rate"] is None and result["hit_blocks"] is None
    assert "not available" in run(capsys, path, "--costs")


def test_turns_tenants_and_sources(capsys):
    """Who hits, in which turn, and whose blocks they are."""
    generated = ("--generate", "tenants", "--set", "num_conversations=40", "--seed", 3)
    document = run_json(capsys, *generated, "--by-turn", "--by-tenant", "--sources", "--cache-outputs")
    (result,) = document["results"]
    assert [group["turn"] for group in result["by_turn"]][:2] == [1, 2]
    assert sum(group["requests"] for group in result["by_turn"]) == result["requests"]
    assert sum(group["hit_tokens"] for group in result["by_tenant"]) == result["hit_tokens"]
    assert {"within_rate", "across_rate"} <= document["sources"][0].keys()


def test_every_question_at_once_in_json_csv_and_a_plot(capsys, trace, tmp_path):
    """Each is a flag, and flags go together."""
    document = run_json(
        capsys, trace, "--sweep", "--curve", "--sample", 0.9, "--block-sizes", 512, 1024, "--memory", "--costs",
        "--by-turn", "--num-blocks", 4, "--csv", tmp_path / "out.csv", "--plot", tmp_path / "out.png",
        "--preemption",
    )  # fmt: skip
    assert {"sweep", "curve", "sampled_curve", "block_sizes", "memory", "costs", "preemption"} <= document.keys()
    assert all(point["regret"] >= 0 for point in document["sweep"])
    assert [use["allocator"] for use in document["memory"]] == ["radix", "hash", "paged", "slot"]
    assert [r["memory"]["allocator"] for r in document["results"]] == ["radix", "hash", "paged", "slot"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
    assert [row["place"] for row in rows] == ["nowhere", "device", "host", "disk"]


def test_slots_and_pages_find_nothing_again_and_say_what_they_hold(capsys, trace):
    """The allocators without a cache are there to compare memory."""
    results = run_json(capsys, trace, "--allocator", "slot", "paged", "hash", "radix")["results"]
    assert [r["hit_blocks"] for r in results] == [0, 0, 6, 6]
    assert results[0]["memory"]["peak_tokens"] == 1040 * results[0]["memory"]["peak_running"]


def test_a_generated_workload_is_written_and_read_back(capsys, tmp_path):
    """What was simulated can be simulated again, by others too."""
    path = tmp_path / "chat.jsonl.gz"
    first = run_json(capsys, "--generate", "chat", "--set", "num_conversations=5", "--write", path)["results"]
    again = run_json(capsys, path)["results"]
    for result in (*first, *again):
        del result["seconds"]
        del result["definition"]
    assert first == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a trace or --generate"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["--generate", "chat", "--set", "num_turns=x"], "KEY=VALUE with a number"),
        (["--generate", "chat", "--set", "nothing=1"], "nothing"),
        (["TRACE", "--policy", "optimal", "--cache-outputs"], "--cache-outputs"),
        (["TRACE", "--block-size", "500"], "multiples of 512"),
        (["TRACE", "--warmup", "2"], "warmup is 2"),
        (["TRACE", "--preemption"], "needs --num-blocks"),
        (["TRACE", "--plot", "x.bmp"], "allowed: a name that ends in"),
        (["TRACE", "--num-blocks", "0"], "must be at least 1"),
        (["TRACE", "--link", "host"], "NAME=GB/S"),
        (["TRACE", "--set", "a=1"], "belongs to --generate"),
    ],
)
def test_bad_input_is_one_line_on_stderr(capsys, trace, arguments, message):
    """Exit status 2, no traceback, and what is allowed."""
    argv = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    assert main(["simulate", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_a_malformed_row_is_an_error_or_a_counted_skip(capsys, trace):
    """With file, line and reason."""
    with trace.open("a", encoding="utf-8") as file:
        file.write('{"timestamp": 1, "input_length": 5000, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["simulate", str(trace)]) == 2
    assert "trace.jsonl:5" in capsys.readouterr().err
    document = run_json(capsys, trace, "--skip-bad")
    assert document["num_skipped"] == 1 and document["results"][0]["requests"] == 4


def test_it_runs_without_torch(trace):
    """On a laptop that has only the cache installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy'])); "
        f"from engine.cli import main; sys.exit(main(['simulate', {str(trace)!r}, '--sweep', '--memory']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "regret" in done.stdout


def test_preemption_under_pressure_wastes_what_it_says(trace):
    """The scheduler of the engine on this trace: a pool for one and a half requests."""
    results = preemption_pressure(load(trace), 5, block_size=512, victims=["lifo"])
    assert [(r.victim, r.preemption) for r in results] == [("lifo", "recompute"), ("lifo", "swap")]
    for result in results:
        assert (result.requests, result.refused) == (4, 0)
        assert result.finish_s > 0 and 0 <= result.wasted_share < 1
    assert results[0].swapped_tokens == 0


def test_nothing_to_draw_is_said(tmp_path):
    """An empty picture would be found out in the meeting."""
    with pytest.raises(ValueError, match="nothing here has a shape"):
        draw(Findings(), "empty", tmp_path / "x.png")
