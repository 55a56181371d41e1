"""The notebooks are in order: text and notebook hold the same cells, were executed, and give nothing away."""

import json
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="notebooks are paired by jupytext")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"0[1-7]_[a-z_]+")


def test_there_are_seven_in_the_order_of_reading():
    """One question each; the numbers are the order in which they build on each other."""
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"0{number}" for number in range(1, 8)]
    assert all(NUMBER.fullmatch(path.stem) for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_text_and_notebook_hold_the_same_cells(path):
    """The text is what is reviewed, the notebook what is read: a change of one alone would go unseen."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    in_notebook = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    text = jupytext.read(path.with_suffix(".py"))
    assert in_notebook == [(cell.cell_type, cell.source.strip()) for cell in text.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run_from_top_to_bottom(path):
    """Outputs are kept so that pictures are seen where nothing runs; then they must be whole, and without errors."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert "error" not in kinds
    types = {kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})}
    assert types & {"image/png", "image/svg+xml"}, "a notebook shows at least one picture"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_in_a_notebook(path):
    """Paths and warnings of the machine that ran it are noise to everyone else; a megabyte is slow to open."""
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    for part in ("/home/", "/root/", "/work/", "/tmp/", "Warning:", "site-packages"):
        assert part not in text, part
