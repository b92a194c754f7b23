"""Compiles the C++ kernels at first use, keeps the library in the user's cache, and loads it.

Owns the compiler call, the cache's names and its lock. It knows nothing of what the library computes
(`native_ops.py` does). Without a compiler the answer is `Unavailable` with the reason: callers use torch instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=fast: a * b + c is one fused operation wherever the host has it. Never -ffast-math: it reorders sums.
# Hidden symbols: a second version of the library in the process must not bind to the first one's functions.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden")


@dataclass(frozen=True)
class Unavailable:
    """Why this machine has no native library, e.g. `Unavailable("no C++ compiler: none of c++, g++, clang++ ...")`."""

    reason: str


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library and the file it came from; entry points are `library.hf_...` of kernels/native/*.cpp."""

    path: Path
    library: ctypes.CDLL


@functools.cache
def native_library() -> NativeLibrary | Unavailable:
    """The library for this host, compiled if no process of this user did so before (some 20 s), else from the cache."""
    return build(os.environ, SOURCES)


def build(environment: Mapping[str, str], sources: Path) -> NativeLibrary | Unavailable:
    """Find or make the library of all `sources`/*.cpp. Of several processes that want it at once, one compiles.

    Args:
        environment: where CXX (the compiler, with arguments if it needs some) and XDG_CACHE_HOME are looked up.
    """
    command = compiler(environment)
    if isinstance(command, Unavailable):
        return command
    try:
        path = library_path(environment, sources, command)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_whole(path):
            with _locked(path.with_suffix(".lock")):
                if not _is_whole(path):
                    _compile(command, sources, path)
        return NativeLibrary(path, ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as error:
        return Unavailable(f"{shlex.join(error.cmd)} failed:\n{error.stderr}")
    except OSError as error:
        return Unavailable(f"{error}: the library is kept under ~/.cache, or under XDG_CACHE_HOME where that is set")


def compiler(environment: Mapping[str, str]) -> list[str] | Unavailable:
    """The compiler's command: $CXX where it is set, otherwise the first of `COMPILERS` on the PATH."""
    chosen = environment.get("CXX", "")
    for name in [chosen] if chosen else COMPILERS:
        try:
            words = shlex.split(name)
        except ValueError as error:
            return Unavailable(f"CXX={chosen} cannot be read: {error}")
        if words and shutil.which(words[0], path=environment.get("PATH")) is not None:
            return words
    wanted = f"CXX={chosen} is not on the PATH" if chosen else f"none of {', '.join(COMPILERS)} is on the PATH"
    return Unavailable(f"no C++ compiler: {wanted}; set CXX to one that knows C++20")


def library_path(environment: Mapping[str, str], sources: Path, command: list[str]) -> Path:
    """Where the library of these sources, this compiler and this kind of CPU is kept."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (shlex.join([*command, *_flags()]), version, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(sources.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache / "hybridflow" / f"native-{digest.hexdigest()[:24]}.so"


def _flags() -> tuple[str, ...]:
    """x86 compilers take -march=native; for ARM it is -mcpu=native that names the host."""
    return (*FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native")


def _cpu_features() -> str:
    """What -march=native depends on: a cache in a shared home directory serves hosts of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(command: list[str], sources: Path, target: Path) -> None:
    """One object per source, all at once, then the library, which appears under its name only when it is whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs, objects = [], []
        for source in sorted(sources.glob("*.cpp")):
            objects.append(f"{folder}/{source.stem}.o")
            words = [*command, *_flags(), "-c", str(source), "-o", objects[-1]]
            jobs.append((words, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)))
        outputs = [(words, job.communicate()[1], job.returncode) for words, job in jobs]
        for words, errors, code in outputs:
            if code != 0:
                raise subprocess.CalledProcessError(code, words, stderr=errors)
        library = f"{folder}/{target.name}"
        subprocess.run([*command, "-shared", "-pthread", *objects, "-o", library], check=True, capture_output=True,
                       text=True)
        digest = Path(folder, "digest")
        digest.write_text(_digest_of(Path(library)))
        os.replace(library, target)
        os.replace(digest, target.with_suffix(".sha256"))


def _is_whole(path: Path) -> bool:
    """Whether the library is there as it was compiled: one that a full disk or a lost power supply has cut short would
    end the process that loads it.
    """
    digest = path.with_suffix(".sha256")
    return path.exists() and digest.exists() and digest.read_text() == _digest_of(path)


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that died."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
