"""The engine on a clock of its own, and the benchmark of the scheduler that is made of it. No torch, no real time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench import scheduler as bench
from engine.cli import main
from engine.config import EngineConfig
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.timed import TimeModel, run_timed
from radixkv import PrefixCache, TokenKey

SECOND_A_STEP = TimeModel(step_s=1.0, token_s=0.01, context_s=0.0001, swap_s=0.001)
TINY = bench.Settings(requests=30, longest=500, seeds=(1,), preemption_blocks=64, order_blocks=600)


def config(num_blocks=64, **limits):
    """Blocks of four tokens."""
    return EngineConfig(block_size=4, num_blocks=num_blocks, max_model_len=10_000, **limits)


def request(name, token_ids, max_tokens, arrival_s=0.0):
    """A request that arrives at a time of the model's clock."""
    return Request(
        request_id=name,
        prompt=TokenKey(token_ids),
        prompt_token_ids=list(token_ids),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=0,
        max_total_tokens=len(token_ids) + max_tokens,
        arrival_s=arrival_s,
    )


def test_the_time_of_a_step_is_what_the_model_says():
    """Two steps: a prefill of 10 tokens, and a decode that attends to 11."""
    one = request("a", range(10), 2)
    core = run_timed([one], config(), PrefixCache(64, 4), SECOND_A_STEP)
    first_s = 1.0 + 10 * 0.01 + 10 * 0.0001
    assert one.first_token_s == pytest.approx(first_s)
    assert core.scheduler.clock() == one.finished_s == pytest.approx(first_s + 1.0 + 0.01 + 11 * 0.0001)
    assert len(one.output_token_ids) == 2


def test_requests_come_when_they_say_and_idle_time_passes():
    """A trace with a gap: the second is not there early, and its waiting counts from its own arrival."""
    early, late = request("early", range(8), 1, 2.0), request("late", range(100, 108), 1, 50.0)
    run_timed([late, early], config(), PrefixCache(64, 4), SECOND_A_STEP)
    assert early.scheduled_s == 2.0
    assert early.finished_s < late.arrival_s == late.scheduled_s


def test_swapped_blocks_take_their_time():
    """What preemption by swapping costs is the copying, in whole blocks."""
    times = {}
    for swap_s in (0.0, 0.001):
        model = TimeModel(step_s=1.0, token_s=0.01, context_s=0.0, swap_s=swap_s)
        requests = [request(name, [ord(name)] * 8, 24) for name in "ab"]
        limits = config(num_blocks=11, preemption="swap", num_swap_blocks=100, enable_prefix_caching=False)
        core = run_timed(requests, limits, PrefixCache(11, 4), model)
        metrics = core.metrics()
        assert metrics.counters.preemptions["swap"] > 0
        times[swap_s] = core.scheduler.clock()
        num_moved = metrics.counters.swapped_out_blocks + metrics.counters.swapped_in_blocks
    assert times[0.001] - times[0.0] == pytest.approx(0.001 * 4 * num_moved)


def test_a_run_gives_the_same_numbers_each_time():
    """Also in another process with another hash seed: comparisons between policies are exact."""
    code = (
        "from engine.bench.scheduler import *; from engine.bench.scheduler import _config, _measure_once; "
        "s = Settings(requests=30, longest=500, seeds=(1,)); "
        "print(_measure_once(list(heavy_tailed(s, 1)), _config(s, 64)))"
    )
    repository = Path(__file__).resolve().parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repository,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and "finish_s" in outputs.pop()


def test_it_runs_without_torch():
    """On the machine of somebody who only plans."""
    code = "import engine.bench.scheduler, sys; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repository)
    assert done.stdout.strip() == ""


def test_a_long_shared_start_is_computed_once_and_unique_prompts_cost_nothing_more():
    """B099: 20 questions behind 2,000 tokens, on a clock of its own: about the work, not about the machine."""

    def played(prompts, is_caching):
        requests = [request(str(n), ids, 4, n / 1000) for n, ids in enumerate(prompts)]
        limits = config(20_000, enable_prefix_caching=is_caching, max_num_batched_tokens=512)
        core = run_timed(requests, limits, PrefixCache(20_000, 4), TimeModel())
        first_s = sum(r.first_token_s - r.arrival_s for r in requests) / len(requests)
        return core.scheduler.counters.prefill_tokens, first_s

    start = list(range(2_000))
    shared = [[*start, *range(10_000 + 30 * n, 10_030 + 30 * n)] for n in range(20)]
    (warm_tokens, warm_s), (cold_tokens, cold_s) = (played(shared, is_caching) for is_caching in (True, False))
    assert (warm_tokens, cold_tokens) == (2_000 + 20 * 30, 20 * 2_030)
    assert warm_s < cold_s / 4
    unique = [range(10_000 * n, 10_000 * n + 500) for n in range(20)]
    assert played(unique, True) == played(unique, False)


class TestBenchmark:
    def test_its_loads_are_pure_functions_of_their_seeds(self):
        """All policies meet the same requests."""
        for load in (bench.heavy_tailed, bench.shared_starts):
            first, second, other = ([r.prompt for r in load(TINY, seed)] for seed in (1, 1, 2))
            assert first == second != other

    def test_the_loads_are_what_they_are_called(self):
        """Few long ones among many short ones; most start with a text that others start with too."""
        lengths = sorted(len(r.prompt) for r in bench.heavy_tailed(bench.Settings(), 1))
        assert lengths[-1] > 10 * lengths[len(lengths) // 2]
        starts = [tuple(r.prompt_token_ids[:32]) for r in bench.shared_starts(bench.Settings(), 1)]
        assert 0.6 < sum(starts.count(start) > 1 for start in starts) / len(starts) < 0.95

    def test_it_prints_tables_and_one_line_of_json(self, capsys, monkeypatch):
        """The last line is for scripts; pressure must be real, or the comparison compares nothing."""
        monkeypatch.setattr(bench, "Settings", lambda **given: TINY)
        main(["bench", "scheduler"])
        out = capsys.readouterr().out
        document = json.loads(out.splitlines()[-1])
        results = {result["name"]: result for result in document["results"]}
        assert document["benchmark"] == "scheduler"
        assert results["preemption, no pressure, cache on: finish"]["preemptions"] == 0
        under_pressure = results["preemption, largest, swap, cache off: finish"]
        assert under_pressure["preemptions"] > 0 and under_pressure["swapped_mib"] > 0
        assert results["order: hit_rate"]["peer_name"] == "fcfs"
        assert "longest-prefix" in out and "computed again" in out
