"""No reduction relies on lanes in step: AMD's wavefronts have 64 lanes or 32, NVIDIA's warps 32, and neither
promises a schedule.

numba's simulator runs the kernels with blocks of 32, 64 and other sizes. It takes threads as they come, so a
missing barrier need not show there. `Machine` below runs one thread at a time from a barrier to the next, in
an order that the test chooses: with every barrier each order gives the same bits, and no two threads meet at
an element of shared memory between two barriers, so that no schedule of any wavefront can matter; with one
barrier taken out some order gives another result. The rest reads the sources.
"""

import ast
import functools
import inspect
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nbtrain
from nbtrain import ops
from nbtrain.device import SIMULATED, backend, block_max, block_sum, cuda, float32, kernel, launch, tuning
from nbtrain.device import reduce as row_sums
from nbtrain.ops import cross_entropy
from nbtrain.ops.attention_decode import attention_decode
from nbtrain.ops.global_norm import LOADS
from nbtrain.ops.sample import sample
from tests import reference
from tests.helpers import assert_close, randn

simulated = pytest.mark.skipif(not SIMULATED, reason="runs kernels in Python: set NUMBA_ENABLE_CUDASIM=1")
SHAPES = [(threads, rows) for threads in (1, 7, 32, 33, 64, 96, 128) for rows in (1, 2, 3)]
# numba's simulator takes up to 2 s for a large block; `Machine` runs all of them.
SOME_SHAPES = [(1, 3), (7, 2), (32, 1), (32, 3), (33, 2), (64, 1), (64, 2), (96, 1), (128, 1)]
ORDERS = ["ascending", "descending", 0, 1]  # of the threads of a block; a number seeds a random one

# (function, which of its barriers) -> what it is for. A test compares this with the sources.
BARRIERS = {
    ("reduce", 0): "the result of the call before is read from the buffer",
    ("reduce", 1): "the first stage reads what other threads wrote",
    ("reduce", 2): "each stage reads the sums of the one before, and all threads read the last",
    ("write_sum", 0): "a column's sums come from every row of threads",
    ("sum_blocks", 0): "the first row of threads reads the sums of the others",
    ("layernorm_backward", 0): "the sums of dweight are read where those of dbias are written",
    ("layernorm_backward", 1): "a column's sums come from every row of threads",
    ("fold_counts", 0): "each stage reads the counts of the one before",
    ("embedding_segments", 0): "every thread reads all tokens of the segment",
    ("embedding_crossing", 0): "the tokens of the round before are read where the next are written",
    ("embedding_crossing", 1): "every thread reads the tokens that all of them fetched",
    ("attention_decode", 0): "a place's score comes from every thread that shares it",
    ("attention_decode", 1): "every thread reads the weights of all places",
    ("attention_decode", 2): "a column's sum comes from every row of threads",
    ("sample", 0): "each stage of the scan reads the sums of other threads",
    ("sample", 1): "a sum is read by a thread further on before it grows",
    ("sample", 2): "each stage reads the sums of the one before, and all threads read the last",
}


def with_blocks(monkeypatch, threads: int):
    """Blocks of `threads` from here on; kernels of other shapes are forgotten."""
    blocks = {name: (threads, 3 if grid else 0) for name, (_, grid) in tuning.BLOCKS.items()}
    monkeypatch.setattr(tuning, "SIMULATED_BLOCKS", blocks)
    forget_kernels()


def forget_kernels():
    for name, module in list(sys.modules.items()):
        if name.startswith(("nbtrain.ops.", "nbtrain.device.reduce", "nbtrain.device.softmax_rows")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.fixture
def blocks_of(monkeypatch):
    yield functools.partial(with_blocks, monkeypatch)
    monkeypatch.undo()
    forget_kernels()


# ----------------------------------------------------------------------------
# numba's simulator, blocks of many sizes


@functools.cache
def _twice_kernel(threads: int, rows: int):
    """Each thread's view of two sums and two maxima, one right after the other."""
    total, largest = block_sum(threads, rows), block_max(threads, rows)

    @kernel(launch_bounds=threads * rows)
    def reduce_twice(a, b, out):
        i = cuda.threadIdx.y * threads + cuda.threadIdx.x
        out[4 * i] = total(a[i])
        out[4 * i + 1] = total(b[i])
        out[4 * i + 2] = largest(a[i])
        out[4 * i + 3] = largest(b[i])

    return reduce_twice


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.float32)


def reduced_twice(threads, rows):
    a, b = integers(2, rows, threads)
    out = np.full((rows, threads, 4), np.nan, np.float32)
    launch(_twice_kernel(threads, rows), 1, (threads, rows), a, b, out)
    return a, b, out


@functools.cache
def _column_kernel(X: int, Y: int):
    write_sum = row_sums.block_rows_sum(X, Y)

    @kernel(launch_bounds=X * Y)
    def column_sums(x, partial, C):
        sums = cuda.local.array(8, float32)
        c = (cuda.blockIdx.x * X + cuda.threadIdx.x) * 8
        for j in range(8):
            sums[j] = x[cuda.threadIdx.y * C + c + j] if c + j < C else float32(0.0)
        write_sum(sums, partial, C)

    return column_sums


def columns_summed(X, Y, C, seed=0):
    """(x, the sums over its Y rows by blocks of X by Y threads)"""
    x = integers(Y, C, seed=seed)
    partial = np.full(C, np.nan, np.float32)
    launch(_column_kernel(X, Y), -(-C // (8 * X)), (X, Y), x, partial, C)
    return x, partial


def assert_reductions_exact(threads, rows):
    """In blocks of (threads, rows), for every thread, and in two calls right after each other."""
    a, b, out = reduced_twice(threads, rows)
    for k, want in enumerate((a.sum(1), b.sum(1), a.max(1), b.max(1))):
        assert (out[..., k] == want[:, None]).all()
    for seed in range(2):
        x, partial = columns_summed(threads, rows, 8 * threads - 3, seed)
        assert (partial == x.sum(0)).all()


@simulated
@pytest.mark.parametrize("threads,rows", SOME_SHAPES)
def test_reductions_are_exact_twice_in_a_row(threads, rows):
    assert_reductions_exact(threads, rows)


@simulated
@pytest.mark.parametrize("threads", [7, 32, 33, 64, 96, 128])
def test_sums_over_blocks_are_exact_twice_in_a_row(blocks_of, threads):
    blocks_of(threads)
    _, X, Y = row_sums._sum_blocks_kernel()
    partial = integers(2, 2 * Y + 1, X - 1)
    for _ in range(2):
        out, second = np.full((2, X - 1), np.nan, np.float32)
        row_sums.sum_blocks(partial.reshape(-1), 2 * Y + 1, out, second)
        assert (out == partial[0].sum(0)).all() and (second == partial[1].sum(0)).all()


@simulated
@pytest.mark.parametrize("threads", [32, 64])
def test_operators_are_right_with_a_wavefront_of_threads_on_a_row(blocks_of, threads):
    """Rows are as long as it takes to give each of the `threads` something to add; those of layernorm's
    backward are short, so that `threads` / 4 of them share a block."""
    blocks_of(threads)
    C, L, V = 8 * threads, 32 * threads - 5, 8 * threads - 3
    assert tuning.row_shape("layernorm_forward", C, 1)[0] == threads
    assert tuning.row_shape("softmax_forward", L, 4)[0] == threads
    assert cross_entropy._row_shape(V)[0] == threads

    x, weight, bias = randn(np, np.float32, (2, C), (C,), (C,))
    y, *_ = ops.layernorm_forward(x, weight, bias)
    assert_close(y, reference.layernorm(x, weight, bias), np.float32)

    x, dy, weight, bias = randn(np, np.float32, (threads // 4 + 1, 40), (threads // 4 + 1, 40), (40,), (40,))
    _, mean, rstd, _ = ops.layernorm_forward(x, weight, bias)
    got = ops.layernorm_backward(dy, x, weight, mean, rstd)
    for name, a, b in zip(("dx", "dweight", "dbias"), got, layernorm_vjp(dy, x, weight), strict=True):
        assert_close(a, b, np.float32, name=name)

    scores, dy = randn(np, np.float32, (1, L), (1, L), seed=1)
    y = ops.softmax_forward(scores)
    want = reference.softmax(scores)
    assert_close(y, want, np.float32)
    want = want * (dy - (dy * want).sum(1, keepdims=True))
    assert_close(ops.softmax_backward(dy, y), want, np.float32, name="dx")

    (logits,) = randn(np, np.float32, (2, V), seed=2)
    targets = np.array([1, V - 1], np.int32)
    losses, _ = ops.cross_entropy_forward(logits, targets)
    assert_close(losses, reference.cross_entropy(logits, targets), np.float32, name="losses")

    (g,) = randn(np, np.float32, (8 * threads * LOADS + 9,), seed=3)
    assert_close(ops.global_norm(g), [reference.global_norm([g])], np.float32, name="norm")


def layernorm_vjp(dy, x, weight, eps=1e-5):
    """In float64; tests/ops/test_layernorm.py ties it to central differences."""
    dy, x, weight = map(reference.f64, (dy, x, weight))
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    xhat = (x - x.mean(-1, keepdims=True)) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)


# ----------------------------------------------------------------------------
# One thread at a time, in a chosen order


class Diverged(Exception):
    """Threads of one block wait at different barriers, or some have ended."""


class Machine:
    """Launches kernels in Python: a thread is a generator that runs until its next barrier.

    order    in which the threads of a block take their turns: "ascending", "descending" or the seed of a new
             order at every barrier
    without  (function, k): its k-th barrier is taken out
    races    where two threads met at an element of shared memory between two barriers, and one wrote it
    """

    def __init__(self, order="ascending", without=None):
        self.order, self.without, self.races, self.removed = order, without, set(), 0
        self.random = np.random.default_rng(order if isinstance(order, int) else 0)
        self.functions, self.shared, self.touched, self.thread = {}, {}, {}, 0
        self.cuda = SimpleNamespace(
            local=SimpleNamespace(array=_poisoned), shared=SimpleNamespace(array=self._shared_array)
        )

    def launch(self, compiled, grid, block, args):
        function = self._rewritten(compiled.py_func)
        (gx, gy), (bx, by) = ((*np.atleast_1d(shape), 1)[:2] for shape in (grid, block))
        self.cuda.gridDim = SimpleNamespace(x=gx, y=gy)
        threads = [SimpleNamespace(x=x, y=y) for y in range(by) for x in range(bx)]
        for y, x in np.ndindex(gy, gx):
            self.cuda.blockIdx = SimpleNamespace(x=x, y=y)
            self.shared.clear()
            with np.errstate(all="ignore"):
                self._run_block(function, threads, args)

    def _run_block(self, function, threads, args):
        if inspect.isgeneratorfunction(function):
            running = [function(*args) for _ in threads]
        else:  # no barrier (any more): the whole of a thread at once
            running = [map(function, *([x] for x in args)) for _ in threads]
        places = set()
        while places != {None}:
            places, self.touched = set(), {}
            for i in self._turns(len(threads)):
                self.cuda.threadIdx, self.thread = threads[i], i
                places.add(next(running[i], None))
            if len(places) > 1:
                raise Diverged(f"threads wait at {places}")

    def _turns(self, n):
        if isinstance(self.order, int):
            return self.random.permutation(n)
        return range(n) if self.order == "ascending" else reversed(range(n))

    def _shared_array(self, shape, dtype):
        caller = inspect.currentframe().f_back
        place = caller.f_code.co_name, caller.f_lineno
        if place not in self.shared:
            self.shared[place] = _Shared(self, place, _poisoned(shape, dtype))
        return self.shared[place]

    def touch(self, place, index, writes):
        threads, written = self.touched.get((place, index), (frozenset(), False))
        self.touched[place, index] = threads, written = threads | {self.thread}, written or writes
        if written and len(threads) > 1:
            self.races.add((*place, index))

    def _rewritten(self, function):
        """The function with `cuda` and the device functions of this machine; a generator if it holds barriers
        or calls a function that does."""
        if function in self.functions:
            return self.functions[function]
        used = inspect.getclosurevars(function)
        names = {**function.__globals__, **used.nonlocals, "cuda": self.cuda}
        for name, value in {**used.globals, **used.nonlocals}.items():
            if hasattr(value, "py_func"):
                names[name] = self._rewritten(value.py_func)
        waiting = {name for name, value in names.items() if inspect.isgeneratorfunction(value)}
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        tree.body[0].decorator_list = []
        name, k = self.without or (None, None)
        yields = _Yields(function.__name__, k if name == function.__name__ else None, waiting)
        tree = ast.fix_missing_locations(yields.visit(tree))
        exec(compile(tree, f"<{function.__name__}>", "exec"), names)
        self.removed += yields.removed
        self.functions[function] = names[function.__name__]
        return names[function.__name__]


class _Yields(ast.NodeTransformer):
    """cuda.syncthreads() -> yield its place, f(x) -> yield from f(x) where f waits itself."""

    def __init__(self, function, without, waiting):
        self.function, self.without, self.waiting = function, without, waiting
        self.found = self.removed = 0

    def visit_Expr(self, node):
        if not is_barrier(node.value):
            return self.generic_visit(node)
        self.found += 1
        if self.found - 1 == self.without:
            self.removed += 1
            return ast.Pass()
        return ast.Expr(ast.Yield(ast.Constant(f"{self.function}:{self.found}")))

    def visit_Call(self, node):
        self.generic_visit(node)
        waits = isinstance(node.func, ast.Name) and node.func.id in self.waiting
        return ast.YieldFrom(node) if waits else node


class _Shared:
    """An array of shared memory that tells the machine who touches what."""

    def __init__(self, machine, place, values):
        self.machine, self.place, self.values = machine, place, values

    def __getitem__(self, index):
        self.machine.touch(self.place, index, False)
        return self.values[index]

    def __setitem__(self, index, value):
        self.machine.touch(self.place, index, True)
        self.values[index] = value


def _poisoned(shape, dtype):
    """Memory that nobody has written: nan, or 0 where it holds integers (no case has an id of 0)."""
    return np.full(shape, np.nan if dtype == float32 else 0, np.dtype(dtype.name))


# What each function with a barrier is run by. Every case returns the arrays that depend on it.


def case_reduce(rows=2, threads=7):
    return reduced_twice(threads, rows)[2:]


def case_write_sum():
    return columns_summed(4, 3, 27)[1:]


def case_sum_blocks():
    (partial,) = randn(np, np.float32, (2 * 5 * 7,))
    out, second = np.empty((2, 7), np.float32)
    row_sums.sum_blocks(partial, 5, out, second)
    return out, second


def case_layernorm_backward():
    x, dy, weight, bias = randn(np, np.float32, (9, 24), (9, 24), (24,), (24,))
    y, mean, rstd, _ = ops.layernorm_forward(x, weight, bias)
    return y, mean, rstd, *ops.layernorm_backward(dy, x, weight, mean, rstd)


def case_batch_check():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 50, (2, 1, 3, 17)).astype(np.int32)
    tokens[0, 2, 5], targets[0, 1, 3], targets[0, 2, 3], targets[0, 0, 1] = 50, -7, 99, -100
    return ops.batch_check(tokens, targets, np.float32([8.0]), vocab_size=50)


def case_embedding():
    """One token fills the segments of several rounds of `embedding_crossing`; the others are spread."""
    tokens = np.full((1, 300), 3, np.int32)
    tokens[0, 230:] = np.random.default_rng(0).integers(1, 6, 70)
    (dx,) = randn(np, np.float32, (1, 300, 16))
    dwte, dwpe = np.zeros((6, 16), np.float32), np.empty((300, 16), np.float32)
    ops.embedding_backward(dx, tokens, tokens[0].argsort(kind="stable").astype(np.int32), dwte, dwpe)
    return dwte, dwpe


def case_attention_decode():
    """Several rounds of several places, each shared by several threads."""
    qkv, k, v = randn(np, np.float32, (2, 48), (2, 1, 70, 16), (2, 1, 70, 16))
    return (attention_decode(qkv, k, v, np.array([21, 69], np.int32)),)


def case_sample():
    """Draws from rows of equal logits, which every sum of the scan decides."""
    rng = np.array([1, 2, 0], np.uint32)
    return (sample(np.zeros((6, 90), np.float32), rng), sample(np.zeros((2, 90), np.float32), rng, top_k=41))


def case_cross_entropy_forward():
    """The target of a row belongs to a thread other than the one that reads its logit."""
    (logits,) = randn(np, np.float32, (3, 77))
    targets = np.array([70, 9, 33], np.int32)
    losses = ops.cross_entropy_forward_backward(logits, targets, np.float32([0.25]), vocab_size=75)
    return losses, logits


def case_gelu_and_linear():
    x, dy, bias = randn(np, np.float32, (9, 40), (9, 40), (40,))
    weight, dout = randn(np, np.float32, (40, 9), (9, 9))
    return *ops.gelu_backward(dy, x, bias), *ops.linear_backward(dout, x, weight)


def case_softmax_and_norm():
    x, dy = randn(np, np.float32, (3, 65), (3, 65))
    y = ops.softmax_forward(x)
    return y, ops.softmax_backward(dy, y), ops.global_norm(x.reshape(-1), dy.reshape(-1))


CASES = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}


def case_of(function):
    if function.startswith("embedding"):
        return CASES["embedding"]
    return CASES["batch_check" if function == "fold_counts" else function]


def run_on(machine, monkeypatch, case):
    with monkeypatch.context() as patch:
        patch.setattr(backend, "launch", machine.launch)
        return case()


def same_bits(got, want):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, want, strict=True))


@simulated
@pytest.mark.parametrize("case", CASES)
def test_no_order_of_the_threads_changes_a_bit_and_no_two_of_them_race(monkeypatch, blocks_of, case):
    """The results are those of numba's simulator, whose order is the operating system's."""
    blocks_of(64)
    want = CASES[case]()
    assert all(np.isfinite(x).all() for x in want)
    for order in ORDERS:
        machine = Machine(order)
        got = run_on(machine, monkeypatch, CASES[case])
        assert machine.functions and machine.races == set()
        assert same_bits(got, want), order


@simulated
@pytest.mark.parametrize("threads,rows", SHAPES)
def test_reductions_are_exact_and_race_in_no_block_and_no_order(monkeypatch, threads, rows):
    for order in ORDERS[:3]:
        machine = Machine(order)
        run_on(machine, monkeypatch, functools.partial(assert_reductions_exact, threads, rows))
        assert machine.functions and machine.races == set()


@simulated
@pytest.mark.parametrize("barrier", BARRIERS, ids="{0[0]}-{0[1]}".format)
def test_without_a_barrier_some_order_goes_wrong(monkeypatch, barrier):
    case = case_of(barrier[0])
    want = run_on(Machine(), monkeypatch, case)
    wrong, races = [], set()
    for order in ORDERS:
        machine = Machine(order, without=barrier)
        try:
            right = same_bits(run_on(machine, monkeypatch, case), want)
        except Diverged:
            right = False
        assert machine.removed
        races |= machine.races
        if not right:
            wrong.append(order)
    assert wrong, f"{barrier} is not needed: {BARRIERS[barrier]}"
    assert races


# ----------------------------------------------------------------------------
# What the sources say

PACKAGE = Path(nbtrain.__file__).parent
SOURCES = [*sorted((PACKAGE / "ops").rglob("*.py")), *sorted((PACKAGE / "device").rglob("*.py"))]
PORTABLE = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
    for path in SOURCES
    if "nvidia" not in path.relative_to(PACKAGE).parts
}
# Names, and parts of LLVM's, of what works on the lanes of a warp or counts on their number.
OF_LANES = (
    "shfl", "shuffle", "ballot", "vote", "syncwarp", "activemask", "lanemask", "laneid", "warpsize",
    "match_any", "match_all", "all_sync", "any_sync", "eq_sync", "swizzle", "permlane", "dpp", "readlane",
    "readfirstlane", "bpermute",
)  # fmt: skip


def is_barrier(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "cuda.syncthreads"


def functions_of(tree):
    """(function, the nodes in it that are in no function inside it)"""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            nodes, inside = [], list(function.body)
            while inside:
                node = inside.pop()
                if not isinstance(node, ast.FunctionDef):
                    nodes.append(node)
                    inside += ast.iter_child_nodes(node)
            yield function, nodes


def uses_of_lanes(tree):
    """Docstrings may speak of them; names, attributes and the texts of instructions may not."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        words = (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = (node.value,)
        for word in words:
            yield from (part for part in OF_LANES if part in str(word).lower())


def halves(node):
    """x >>= 1, x //= 2, x = x >> 1 or x = x // 2"""
    if isinstance(node, ast.AugAssign):
        operation, by = node.op, node.value
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        operation, by = node.value.op, node.value.right
    else:
        return False
    return isinstance(by, ast.Constant) and (type(operation), by.value) in (
        (ast.RShift, 1),
        (ast.FloorDiv, 2),
    )


def tree_loops(tree):
    """(line, whether every stage has a barrier) of the loops that halve a number and use shared memory. A
    barrier counts that each pass meets: not one behind a condition."""
    for _, nodes in functions_of(tree):
        shared = {
            node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("cuda.shared.array(")
        }
        for loop in nodes:
            if isinstance(loop, ast.While | ast.For):
                inside = list(ast.walk(loop))
                touches = any(isinstance(node, ast.Name) and node.id in shared for node in inside)
                if touches and any(map(halves, inside)):
                    stages = (is_barrier(s.value) for s in loop.body if isinstance(s, ast.Expr))
                    yield loop.lineno, any(stages)


@pytest.mark.parametrize("path", PORTABLE)
def test_portable_kernels_use_nothing_that_belongs_to_a_warp(path):
    assert list(uses_of_lanes(PORTABLE[path])) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = cuda.shfl_xor_sync(m, x, 1)", "from numba.cuda import shfl_sync", "cuda.syncwarp()",
        "i = cuda.laneid", "m = cuda.activemask()", "b = cuda.ballot_sync(m, p)", "w = cuda.warpsize",
        "f = 'llvm.amdgcn.ds.bpermute'",
    ],
)  # fmt: skip
def test_what_belongs_to_a_warp_is_found(source):
    assert list(uses_of_lanes(ast.parse(f"def f(x):\n    '''No shuffles.'''\n    {source}")))


def test_every_stage_of_every_tree_has_a_barrier():
    found = {path: list(tree_loops(tree)) for path, tree in PORTABLE.items()}
    assert {path for path in found if found[path]} == {"device/vector.py", "ops/batch_check.py"}
    assert all(barrier for loops in found.values() for _, barrier in loops)


@pytest.mark.parametrize("halving", ["half >>= 1", "half //= 2", "half = half // 2"])
@pytest.mark.parametrize(
    "barrier,enough", [("pass", 0), ("if x: cuda.syncthreads()", 0), ("cuda.syncthreads()", 1)]
)
def test_a_stage_without_a_barrier_is_found(halving, barrier, enough):
    source = (
        "def f(x):\n buf = cuda.shared.array(8, float32)\n cuda.syncthreads()\n while half > 0:\n"
        f"  buf[x] += buf[x + half]\n  {barrier}\n  {halving}\n cuda.syncthreads()"
    )
    assert [found for _, found in tree_loops(ast.parse(source))] == [bool(enough)]


def test_every_barrier_of_portable_kernels_is_in_the_table():
    found = {
        (function.name, k)
        for tree in PORTABLE.values()
        for function, nodes in functions_of(tree)
        for k in range(sum(map(is_barrier, nodes)))
    }
    assert found == set(BARRIERS)
