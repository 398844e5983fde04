"""Imports point one way only; this is the architecture, as a test (docs/design.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "nbtrain"
# A module may import from earlier rows, and from its own row where that is said.
LAYERS = [
    {"errors"},
    {"files", "bpe", "lock", "interrupt"},
    {"device"},
    {"config", "tree"},
    {"ops"},
    {"batch", "token_file", "tensor_file", "tokenizer", "checkpoint_index"},
    {"documents"},
    {"encoding"},
    {"prepare"},
    {"text", "precision", "optim", "data", "decode", "model", "monitor", "speed"},
    {"train"},
    {"modes", "compile_worker"},
    {"checkpoint", "evaluation", "generate", "log", "plan"},
    {"checkpoints", "huggingface"},
    {"run", "doctor", "verify"},
    {"cli"},
    {"__init__", "__main__"},
]
RANK = {name: i for i, row in enumerate(LAYERS) for name in row}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "nbtrain":
                yield from (f"nbtrain.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_point_one_way():
    for path, module in modules():
        assert module in RANK, f"{path}: say which layer it belongs to"
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "nbtrain" and len(parts) > 1 and parts[1] in RANK:
                same = module == parts[1] in ("device", "cli") or path.parts[-2:] == ("ops", "__init__.py")
                assert same or RANK[parts[1]] < RANK[module], f"{path} imports {name}, which lies above it"


def test_operators_do_not_import_each_other():
    for path in sorted((ROOT / "ops").glob("*.py")):
        if path.stem == "__init__":
            continue
        own = path.stem.removesuffix("_kernels")
        for name in imports(path):
            assert not name.startswith("nbtrain.ops.") or name == f"nbtrain.ops.{own}_kernels", (
                f"{path} imports {name}"
            )


def test_numba_and_cupy_stay_inside_device():
    for path, module in modules():
        if module != "device":
            found = {name.split(".")[0] for name in imports(path)} & {
                "numba",
                "cupy",
                "cupyx",
                "llvmlite",
                "nvmath",
            }
            assert not found, f"{path} imports {found}"


def test_no_operator_names_a_vendor():
    for path in sorted((ROOT / "ops").glob("*.py")):
        text = path.read_text().lower()
        for word in ("nvidia", "amd", "rocm", "hip:", "cublas", "hipblas", "ptx", "sm_80", "sm_90"):
            assert word not in text.replace("adamw", ""), f"{path} names {word}"


def test_nothing_but_the_cache_of_compiled_code_is_pickled():
    """Files that are given, carried or downloaded are data. numba's cache lies in a folder that only its user
    can write to."""
    serializers = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch"}
    for path, _ in modules():
        found = {name.split(".")[0] for name in imports(path)} & serializers
        assert not found or path == ROOT / "device" / "cpu.py", f"{path} imports {found}"
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), f"{path}: allow_pickle"
