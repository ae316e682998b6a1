"""Compiler launcher for .cu files: keeps ptxas' resource report beside the object (<object>.ptxas, for tools/kernel_report.py)
and fails on what ptxas only mentions: C75xx (wgmma serialised: the kernel is slow or wrong) and, with --most-spills=N, kernels
that store more than N bytes of spilled registers."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    arguments = [argument for argument in arguments if argument]  # CMake 4 passes an empty one where an option is off
    limited = arguments[0].startswith("--most-spills=")
    most_spills = int(arguments[0].split("=")[1]) if limited else None
    command = arguments[1:] if limited else arguments
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    used = resource.getrusage(
        resource.RUSAGE_CHILDREN
    )  # of one core: a busy machine does not change it, a ccache hit is nearly none
    seconds = used.ru_utime + used.ru_stime
    report = [line for line in process.stdout.splitlines() if re.search(r"ptxas info|bytes stack frame|Compiling entry", line)]
    rest = [line for line in process.stdout.splitlines() if line not in report]
    if rest:
        print("\n".join(rest))
    if process.returncode != 0 or "-o" not in command:
        return process.returncode

    problems = [line for line in process.stdout.splitlines() if re.search(r"C75\d\d", line)]
    if most_spills is not None:
        spilled = (re.search(r"(\d+) bytes spill stores", line) for line in report)
        problems += [
            f"{found[0]}, at most {most_spills} are allowed" for found in spilled if found and int(found[1]) > most_spills
        ]
    output = Path(command[command.index("-o") + 1])
    if problems:
        print("ptxas warnings that this project treats as errors:", *dict.fromkeys(problems), sep="\n  ")
        output.unlink(missing_ok=True)
        return 1
    output.with_name(output.name + ".ptxas").write_text(f"seconds {seconds:.1f}\n" + "\n".join(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
