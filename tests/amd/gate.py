"""The AMD gate: compiles every portable kernel for three AMD architectures and reads the code objects.

    python tests/amd/gate.py [part of an operator's name]

It needs neither ROCm nor a GPU. A kernel passes if, for each architecture, it links to a code object that

    has no scratch memory and no spilled registers   (by the note of the code object)
    uses at most 64 KiB of shared memory             (the same)
    makes no calls                                   (what a kernel calls is not counted in its note)
    has no fp64 instruction                          (by its machine code)

or if ALLOWED says why not. Every function decorated with `@kernel` in nbtrain/ops must have been recorded.
Prints a line a kernel, then 'N passed, N failed'; exit code 1 if one failed. The environment is built first
if it is not there (see setup_gate.py). Where it cannot be built the gate is skipped with the reason; with
CI=true a skip is a failure.

What this cannot see is whether the kernels run, and whether their results are right.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LDS_LIMIT = 64 * 1024

# (kernel, architecture, rule) -> (the most that is allowed, why)
MASKS = "execution masks of unrolled conditions, kept in lanes of a vector register: no memory is touched"
WIDE = "a block of 1024 threads leaves 96 vector registers to a thread"
ALLOWED: dict[tuple[str, str, str], tuple[int, str]] = {
    ("softmax_forward", "gfx90a", "sgpr_spills"): (12, MASKS),
    ("softmax_forward", "gfx942", "sgpr_spills"): (8, MASKS),
    ("sample", "gfx90a", "sgpr_spills"): (22, MASKS),
    ("sample", "gfx942", "sgpr_spills"): (32, MASKS),
    ("softmax_backward", "gfx1100", "vgpr_spills"): (2, WIDE),
    ("softmax_backward", "gfx1100", "scratch"): (12, WIDE),
}


@dataclass
class Row:
    """One kernel with one signature on one architecture."""

    kernel: str
    arguments: str
    arch: str
    error: str = ""
    numbers: dict = field(default_factory=dict)  # what the code object says, and what its machine code holds
    broken: list = field(default_factory=list)  # the rules that it breaks


def main(argv=None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("only", nargs="?", default="", help="part of an operator's name")
    options.add_argument(
        "--calls", default="tests.kernel_calls", help="the module whose record() says what to compile"
    )
    options.add_argument("--json", help="a file to write all rows to")
    options.add_argument("--jobs", type=int, default=2)
    options = options.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    from tests.amd.setup_gate import GateUnavailable, build_gate

    try:
        gate = build_gate()
    except GateUnavailable as reason:
        print(f"SKIPPED: {reason}")
        return 1 if os.environ.get("CI") == "true" else 0
    if Path(sys.prefix) != gate.folder / "venv":
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("NUMBA_") and k != "PYTHONPATH"
        }
        environment.update(NBTRAIN_TARGET="hip", NBTRAIN_CACHE_DIR=str(gate.folder / "tmp"))
        arguments = sys.argv[1:] if argv is None else argv
        sys.stdout.flush()
        os.execve(gate.python, [str(gate.python), __file__, *arguments], environment)
    return run(gate, options)


def run(gate, options) -> int:
    began = time.monotonic()
    from tests.amd import hipgate

    hipgate.install(gate)
    from numba.hip.typing_lowering import hipdevicelib

    global _calls
    _calls = importlib.import_module(options.calls).record(options.only)
    for arch in hipgate.ARCHITECTURES:
        hipdevicelib.get_llvm_bc(arch)  # before the fork: the workers share it
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        rows = []
        for found in pool.imap(compile_and_check, range(len(_calls))):
            rows += found
            for row in found:
                print(_line(row), flush=True)
    missing = (
        []
        if options.only or options.calls != "tests.kernel_calls"
        else unrecorded({row.kernel for row in rows})
    )
    for name in missing:
        print(f"BAD   {name}: tests/kernel_calls.py never launches this kernel of nbtrain/ops")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    failed = sum(bool(row.broken) for row in rows) + len(missing)
    print(f"{len(_calls)} kernels on {', '.join(hipgate.ARCHITECTURES)} in {time.monotonic() - began:.0f} s")
    print(f"{len(rows) + len(missing) - failed} passed, {failed} failed")
    return 1 if failed or not rows else 0


def compile_and_check(index: int) -> list[Row]:
    from nbtrain.device.hip import compile_for
    from tests.amd import hipgate
    from tests.amd.code_object import read_kernel

    kernel, types, _, block = _calls[index]
    rows = []
    for arch in hipgate.ARCHITECTURES:
        row = Row(kernel.py_func.__name__, _short(types), arch)
        rows.append(row)
        try:
            image = read_kernel(compile_for(kernel, types, arch))
            row.numbers = measure(image, hipgate.disassemble(image.code, arch))
            threads = block if isinstance(block, int) else block[0] * (*block, 1)[1] * (*block, 1, 1)[2]
            row.broken = broken_rules(row.kernel, arch, row.numbers)
            if threads > image.threads:
                row.broken.append("block")
        except Exception as error:  # numba-hip raises whatever its passes raise
            row.error, row.broken = _reason(error), ["compile"]
    return rows


def measure(image, instructions) -> dict:
    names = [line.split()[0] for line in instructions if line]
    return {
        "scratch": image.scratch_bytes,
        "sgpr_spills": image.sgpr_spills,
        "vgpr_spills": image.vgpr_spills,
        "lds": image.lds_bytes,
        "vgprs": image.vgprs,
        "wavefront": image.wavefront,
        "instructions": len(names),
        "f64": sum("_f64" in name for name in names),
        "calls": sum(name.startswith(("s_swappc", "s_call")) for name in names),
    }


def broken_rules(kernel: str, arch: str, numbers: dict) -> list[str]:
    limits = {"scratch": 0, "sgpr_spills": 0, "vgpr_spills": 0, "lds": LDS_LIMIT, "f64": 0, "calls": 0}
    return [rule for rule in limits if numbers[rule] > ALLOWED.get((kernel, arch, rule), (limits[rule],))[0]]


def unrecorded(recorded: set[str]) -> list[str]:
    """The kernels in nbtrain/ops that no recorded launch has used."""
    return sorted(kernels_in_ops() - recorded)


def kernels_in_ops() -> set[str]:
    names = set()
    for path in (ROOT / "nbtrain" / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(called, ast.Name) and called.id == "kernel":
                    names.add(node.name)
    return names


def _short(types) -> str:
    """float32[1] int16[1] …: element type and rank of the arrays, in order, without repetition."""
    arrays = (f"{t.dtype}[{t.ndim}]" for t in types if hasattr(t, "dtype"))
    return " ".join(dict.fromkeys(arrays))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:6])}"[:600]


def _line(row: Row) -> str:
    numbers = " ".join(f"{name}={value}" for name, value in row.numbers.items())
    verdict = f"BAD ({', '.join(row.broken)})" if row.broken else "ok"
    return f"{verdict:5} {row.arch:8} {row.kernel:24} {row.arguments:32} {numbers}{row.error}"


if __name__ == "__main__":
    sys.exit(main())
