"""Reward functions that do what a reward should not, by the name in the answer; loaded by path."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

MOST_FILES = 4096  # more than a long session of tests has open


def hides(data_source, solution_str, ground_truth, extra_info):
    """Leaves a process behind that spins, its id in the file `ground_truth`; solution_str says how it hides."""
    if solution_str.startswith("forks"):
        if os.fork() == 0:
            spin(ground_truth)
    elif solution_str.startswith("own session"):
        if os.fork() == 0:
            os.setsid()
            spin(ground_truth)
    elif solution_str.startswith("daemonises"):
        first = os.fork()
        if first == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                os.closerange(0, 256)
                spin(ground_truth)
            os._exit(0)
        os.waitpid(first, 0)
    elif solution_str.startswith("program"):
        spinning = f"import os\nopen({ground_truth!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
        subprocess.Popen([sys.executable, "-S", "-c", spinning], start_new_session=True)
    elif solution_str.startswith("clean"):
        return 1.0
    while not Path(ground_truth).exists():
        time.sleep(0.01)
    if solution_str.endswith("and dies"):
        os._exit(3)
    while solution_str.endswith("and spins"):
        pass
    return float(os.getpid())


def spin(file):
    Path(f"{file}.new").write_text(str(os.getpid()))
    os.rename(f"{file}.new", file)
    while True:
        pass


def odd(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "prints":
        for _ in range(2000):
            print("x" * 1000)
    elif solution_str == "reads":
        return float(len(input()))
    elif solution_str == "reads at end":
        return float(len(sys.stdin.read()))
    elif solution_str == "closes its socket":
        os.closerange(3, MOST_FILES)
    elif solution_str == "closes its outputs":
        sys.stdout.close()
        os.close(2)
    elif solution_str == "writes into its socket":
        for descriptor in range(3, MOST_FILES):
            try:
                os.write(descriptor, b"\x00\x00\x00\x04oops")
            except OSError:
                pass
    elif solution_str == "threads":
        threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        threading.Thread(target=time.sleep, args=(1000,)).start()
    elif solution_str == "returns twice":
        return 1.0 if os.fork() else 0.25
    elif solution_str == "raises in a fork":
        if os.fork() == 0:
            raise ValueError("of the child")
    elif solution_str == "exits in a thread":
        thread = threading.Thread(target=os._exit, args=(5,))
        thread.start()
        thread.join()
    elif solution_str == "interrupts":
        raise KeyboardInterrupt
    elif solution_str == "recurses":
        return odd(data_source, solution_str, ground_truth, extra_info)
    elif solution_str == "raises what has no text":
        raise Mute
    return 1.0


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def hungry(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "bytes":
        return float(len(bytearray(2 << 30)) > 0)
    if solution_str == "list":
        kept = []
        while True:
            kept.append("x" * (1 << 20) + str(len(kept)))
    if solution_str == "array":
        import numpy

        return float(numpy.ones(1 << 28)[0])
    if solution_str == "child":
        if (child := os.fork()) == 0:
            try:
                bytearray(2 << 30)
            except MemoryError:
                os._exit(42)
            os._exit(0)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return 1.0


def returns(data_source, solution_str, ground_truth, extra_info):
    import numpy
    import torch

    if solution_str == "too large":
        return float(torch.ones(1 << 28)[0])
    return {
        "float32": numpy.float32(0.5), "int64": numpy.int64(3), "bool_": numpy.bool_(True),
        "0-d array": numpy.array(0.25), "0-d tensor": torch.tensor(0.75, requires_grad=True),
        "bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
        "dict": {"score": numpy.float64(0.5), "seen": torch.tensor(2), "list": [1]}, "bool": False,
        "complex": 1 + 0j, "complex128": numpy.complex128(1), "1-d array": numpy.array([1.0]), "list": [1.0],
        "1-d tensor": torch.tensor([1.0]), "bytes": b"1", "text": "1", "none": None, "class": numpy.float64,
        "nan array": numpy.array(numpy.nan), "inf": -float("inf"), "large": 10**400,
        "nan tensor": torch.tensor(torch.nan),
    }[solution_str]  # fmt: skip
