"""What every test shares: one thread, no network, repeatable random examples, and two fixtures that may be absent."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before any test imports torch, which reads them once. One thread: float32 sums keep one order, so exact
# comparisons do not depend on the machine's cores, and tiny models are faster without the hand-over between threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# A model name that is not a directory fails at once instead of asking a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# No deadline and no complaint about slow generation: both depend on what else the machine does.
settings.register_profile("base", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# The same examples each time, so that a red run is about the change and not about luck.
settings.register_profile("default", settings.get_profile("base"), derandomize=True, max_examples=50)
settings.register_profile("ci", settings.get_profile("base"), derandomize=True, max_examples=200)
# New examples each night, in long walks of up to 200,000 steps a machine; a failure prints the line that repeats it.
settings.register_profile("nightly", settings.get_profile("base"), max_examples=400, stateful_step_count=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the converted SmolLM2-135M-Instruct; skips where it cannot be had.

    `RADIXKV_DEMO_MODEL` names a ready directory and then nothing is fetched; a wrong name is an error, not a skip.
    """
    named = os.environ.get("RADIXKV_DEMO_MODEL")
    if named:
        if not (Path(named) / "config.json").is_file():
            raise ValueError(f"RADIXKV_DEMO_MODEL={named!r}: a directory with a config.json is needed")
        return Path(named)
    pytest.importorskip("torch", reason="the demo model needs the extra `engine`")
    from engine.errors import DemoModelUnavailable
    from engine.models.smollm2 import demo_model_directory

    try:
        return Path(demo_model_directory())
    except DemoModelUnavailable as error:
        pytest.skip(f"no demo model: {error}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of public traces and chats beside the checkout; skips where there is none."""
    directory = REPOSITORY.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"no public data at ../{directory.relative_to(REPOSITORY.parent)}")
    return directory
