"""The process of one system, as its parent sees it: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import WORKER, System

PATIENCE_S = 1800.0  # for one answer; compiling a model takes minutes
_ENDING_S = 20.0


class SystemFailed(Exception):
    """Why a system cannot be measured (any more), in one line."""


class EngineProcess:
    """A running worker. Raises SystemFailed from any call once something goes wrong; `close` is always safe.

    variables: of the environment, beside those that hold for all systems.
    """

    def __init__(self, system: System, python: str, threads: int, variables: dict[str, str]) -> None:
        self._is_closed = False
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = dict(os.environ)
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)  # of another interpreter's packages
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait take the core from those that work. Three runtimes, three names.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not system.source:  # ours may be a source tree; a peer's interpreter must not see what lies beside us
            paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER), str(system.adapter_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env={**environment, **variables},
                start_new_session=True,  # so that it can be ended with all the processes that it starts
            )
        except OSError as error:
            self._messages.close()
            raise SystemFailed(f"{python} does not start: {error.strerror}") from error

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of a job. Raises SystemFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SystemFailed(self._last_message()) from error
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        if not ready:
            raise SystemFailed(f"no answer for {PATIENCE_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemFailed(self._last_message())
        answer = json.loads(line)
        if "result" not in answer:
            raise SystemFailed(answer.get("error") or answer["missing"])
        result: dict[str, Any] = answer["result"]
        return result

    def _last_message(self) -> str:
        """What a process that ended without an answer said last."""
        status = self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """Ends the process and those that it started. A second time changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._messages.close()
