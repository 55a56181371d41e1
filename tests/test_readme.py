"""The README is true: its first example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_example_of_the_cache_runs_and_says_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the first thing that a reader tries."""
    example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(example, names)
    assert names["a"].num_cached_tokens == 0  # type: ignore[attr-defined]
    assert names["b"].num_cached_tokens == 4  # type: ignore[attr-defined]
    names["cache"].check()  # type: ignore[attr-defined]
    assert "radix tree: 1 nodes" in capsys.readouterr().out
