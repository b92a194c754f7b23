"""Compiling at first use: who compiles, when again, and what is said where it cannot be done."""

import os
import shlex
import stat
import sys
import threading

import pytest

from hybridflow.kernels.native_build import SOURCES, NativeLibrary, Unavailable, build, compiler, library_path

FOUND = compiler(os.environ)
if isinstance(FOUND, Unavailable):
    pytest.skip(FOUND.reason, allow_module_level=True)


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("inline int answer() { return 42; }\n")
    (folder / "one.cpp").write_text('#include "answer.h"\nint two();\n'
                                    'extern "C" __attribute__((visibility("default"))) int sum() '
                                    "{ return answer() + two(); }\n")
    (folder / "two.cpp").write_text("int two() { return 2; }\n")
    return folder


@pytest.fixture
def environment(tmp_path):
    """A compiler that writes a line into `calls` for each source it compiles, and a cache of its own."""
    wrapper = tmp_path / "compile.py"
    wrapper.write_text(
        "import subprocess, sys\n"
        f"if '-c' in sys.argv: open({str(tmp_path / 'calls')!r}, 'a').write('call\\n')\n"
        f"sys.exit(subprocess.call({FOUND!r} + sys.argv[1:]))\n"
    )
    chosen = shlex.join([sys.executable, str(wrapper)])
    return {"PATH": os.environ["PATH"], "CXX": chosen, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def calls(tmp_path):
    return len((tmp_path / "calls").read_text().splitlines())


def test_compiled_once_by_many_at_a_time_and_found_again(sources, environment, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(build(environment, sources))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(build(environment, sources))
    assert all(isinstance(each, NativeLibrary) and each.library.sum() == 44 for each in found)
    assert len({each.path for each in found}) == 1
    assert calls(tmp_path) == 2  # one for each source
    left = sorted(path.suffix for path in found[0].path.parent.iterdir())
    assert left == [".lock", ".sha256", ".so"]


def test_other_sources_another_library(sources, environment, tmp_path):
    first = build(environment, sources)
    (sources / "answer.h").write_text("inline int answer() { return 43; }\n")
    second = build(environment, sources)
    assert first.path != second.path
    assert (first.library.sum(), second.library.sum()) == (44, 45)
    assert calls(tmp_path) == 4


def test_an_error_of_the_compiler_is_the_reason_and_leaves_nothing(sources, environment):
    (sources / "two.cpp").write_text("int two() { return nonsense; }\n")
    answer = build(environment, sources)
    assert isinstance(answer, Unavailable)
    assert "nonsense" in answer.reason and "two.cpp" in answer.reason
    assert not library_path(environment, sources, shlex.split(environment["CXX"])).exists()
    (sources / "two.cpp").write_text("int two() { return 1; }\n")
    assert build(environment, sources).library.sum() == 43


def test_no_compiler_says_what_was_sought(sources, environment, tmp_path):
    answer = build({**environment, "CXX": "no-such-compiler"}, sources)
    assert answer == Unavailable("no C++ compiler: CXX=no-such-compiler is not on the PATH; set CXX to one that knows "
                                 "C++20")
    answer = build({"PATH": str(tmp_path), "XDG_CACHE_HOME": environment["XDG_CACHE_HOME"]}, sources)
    assert "none of c++, g++, clang++ is on the PATH" in answer.reason


def test_a_compiler_that_only_fails_is_a_reason_too(sources, environment, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    answer = build({**environment, "CXX": str(broken)}, sources)
    assert isinstance(answer, Unavailable) and "out of order" in answer.reason


def test_a_cache_that_cannot_be_written_is_named(sources, environment, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    answer = build(environment, sources)
    assert isinstance(answer, Unavailable) and "XDG_CACHE_HOME" in answer.reason


def test_sources_are_installed_beside_the_module():
    assert {"api.cpp", "gemm.h", "threads.h"} <= {path.name for path in SOURCES.iterdir()}


@pytest.mark.parametrize("spoil", [lambda _: b"", lambda whole: whole[:-100], lambda whole: whole[:-100] + bytes(100)],
                         ids=["empty", "short", "zeros"])
def test_a_library_that_is_not_whole_is_compiled_again(spoil, sources, environment, tmp_path):
    path = library_path(environment, sources, shlex.split(environment["CXX"]))
    path.parent.mkdir(parents=True)
    digest = path.with_suffix(".sha256")
    made = build(environment | {"XDG_CACHE_HOME": str(tmp_path / "other")}, sources)
    path.write_bytes(spoil(made.path.read_bytes()))  # of another place: this process has that one open
    digest.write_text(made.path.with_suffix(".sha256").read_text())
    assert build(environment, sources).library.sum() == 44
    assert calls(tmp_path) == 4


@pytest.mark.parametrize("command", ["  ", '"g++', "/nowhere/g++"])
def test_a_compiler_that_is_none_is_named(command, sources, environment):
    found = build(environment | {"CXX": command}, sources)
    assert isinstance(found, Unavailable) and "CXX" in found.reason
