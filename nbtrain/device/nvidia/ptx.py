"""Tensor-core building blocks for kernels: LLVM IR and inline PTX, written while numba lowers an intrinsic.

A *tile routine* is a Python function `routine(e, *arguments)` over an emitter `e` and Python lists of its
values, one value a thread: a tile of an accumulator is a flat list. `Tiles.op("i32, f32*32 -> f32*32")`
makes it callable in a kernel, where such a list is a UniTuple; once LLVM has taken the tuples apart,
every element is a register. The emitter is the only thing that knows PTX, so tests run the same routines,
and the kernels that call them, on an emitter that computes with NumPy.

Facts that the code leans on:

* wgmma.fence, every issue, commit and wait stand in one asm block with tied accumulators: were issue and
  wait two blocks, LLVM's copies between them would make ptxas insert a wait behind each product (its
  warning C7517).
* A shared tile has rows of 128 bytes, eight chunks of 16; chunk c of row r lies at c ^ (r & 7). That is
  wgmma's 128-byte swizzle, where tiles begin at multiples of 1024 bytes, and ldmatrix meets no bank
  conflict in it.
* `//` in a kernel is a 64-bit division; `udiv` is 32 bits wide. `uniform` says that a value is the same
  in a whole warp.
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
ROW_BYTES = 128
_SCALARS = {"i32": types.int32, "u32": types.uint32, "i64": types.int64, "f32": types.float32}


class Product(NamedTuple):
    """acc (64 x n) += A (64 x 16 k) B (16 k x n), for the four warps of a warpgroup, 16 rows a warp.

    Columns beyond 64 of a tile in shared memory lie in further panels of 64 columns, `panel` bytes apart.
    """

    acc: list | None  # n / 2 registers a thread; None: zero
    n: int
    k: int
    a: Any  # 4 k registers of packed pairs, or the address of 64 rows of 16 k columns
    b: Any  # an address
    by_rows_of_k: bool  # B is stored as 16 k rows of n columns; else as n rows of 16 k columns
    a_panel: int = 0
    b_panel: int = 0

    def a_offset(self, k: int) -> int:
        return k // 4 * self.a_panel + k % 4 * 32

    def b_offset(self, k: int) -> int:
        return k * 16 * ROW_BYTES if self.by_rows_of_k else k // 4 * self.b_panel + k % 4 * 32


class Emitter:
    """PTX for one tile routine. `storage` is f16 or bf16; `arch` 80 multiplies by mma.sync, 90 by wgmma.

    Integers are 32 bits wide, global addresses 64; an operand may be a Python number where that is said
    by its name.
    """

    def __init__(self, builder, storage: str, arch: int):
        self.builder, self.storage, self.arch = builder, storage, arch

    def asm(self, result, text, constraints, values, side_effect=False, convergent=False):
        """result: None, a type, or a list of types, for which a list is returned."""
        struct = isinstance(result, list)
        type_ = ir.VoidType() if result is None else ir.LiteralStructType(result) if struct else result
        function = ir.FunctionType(type_, [v.type for v in values])
        block = ir.InlineAsm(function, text, constraints, side_effect=side_effect)
        attributes = ("convergent", "nounwind") if convergent else ("nounwind",)
        value = self.builder.call(block, values, attrs=attributes)
        return [self.builder.extract_value(value, i) for i in range(len(result))] if struct else value

    # -- integers; `b` may be a Python int

    def i(self, value):
        return ir.Constant(I32, value)

    def _i(self, value):
        return self.i(value) if isinstance(value, int) else value

    def add(self, a, b):
        return a if b == 0 and isinstance(b, int) else self.builder.add(a, self._i(b))

    def sub(self, a, b):
        return self.builder.sub(a, self._i(b))

    def mul(self, a, b):
        return self.builder.mul(a, self._i(b))

    def xor(self, a, b):
        return a if b == 0 and isinstance(b, int) else self.builder.xor(a, self._i(b))

    def and_(self, a, b):
        return self.builder.and_(a, self._i(b))

    def shl(self, a, b):
        return self.builder.shl(a, self._i(b))

    def shr(self, a, b):
        return self.builder.lshr(a, self._i(b))

    def udiv(self, a, b):
        return self.builder.udiv(a, self._i(b))

    def min(self, a, b):
        b = self._i(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def select_ge(self, x, bound: int, a, b):
        """a where x >= bound, else b."""
        return self.builder.select(self.builder.icmp_signed(">=", x, self.i(bound)), a, b)

    def add64(self, a, b):
        if isinstance(b, int):
            return a if b == 0 else self.builder.add(a, ir.Constant(I64, b))
        return self.builder.add(a, b)

    # -- fp32

    def f(self, value):
        return ir.Constant(F32, float(value))

    def fadd(self, a, b):
        return self.builder.fadd(a, b)

    def fsub(self, a, b):
        return self.builder.fsub(a, b)

    def fmul(self, a, b):
        return self.builder.fmul(a, b)

    def fma(self, a, b, c):
        return self.builder.fma(a, b, c)

    def fmax(self, a, b):
        return self.asm(F32, "max.f32 $0, $1, $2;", "=f,f,f", [a, b])

    def exp2(self, a):
        return self.asm(F32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", [a])

    def log2(self, a):
        return self.asm(F32, "lg2.approx.ftz.f32 $0, $1;", "=f,f", [a])

    def rcp(self, a):
        return self.asm(F32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [a])

    def shuffle_xor(self, a, mask: int):
        return self.asm(F32, f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", "=f,f", [a], True, True)

    # -- two 16-bit numbers in a word

    def pack(self, low, high):
        return self.asm(I32, f"cvt.rn.{self.storage}x2.f32 $0, $1, $2;", "=r,f,f", [high, low])

    def unpack(self, word):
        if self.storage == "bf16":
            high = self.builder.and_(word, ir.Constant(I32, 0xFFFF0000))
            return [
                self.builder.bitcast(self.builder.shl(word, self.i(16)), F32),
                self.builder.bitcast(high, F32),
            ]
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        return self.asm([F32, F32], text, "=f,=f,r", [word])

    # -- where a thread stands

    def register(self, name: str):
        return self.asm(I32, f"mov.u32 $0, %{name};", "=r", [])

    def thread(self):
        return self.register("tid.x")

    def uniform(self, x):
        return self.asm(I32, "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], True, True)

    # -- tensor cores

    def load_matrices(self, address, offset: int, transposed: bool):
        """ldmatrix: four 8 x 8 matrices, one row address a lane."""
        form = "x4.trans" if transposed else "x4"
        text = f"ldmatrix.sync.aligned.m8n8.{form}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return self.asm([I32] * 4, text, "=r,=r,=r,=r,r,~{memory}", [address], True, True)

    def mma(self, c, a, b):
        """16 x 8 += (16 x 16)(16 x 8), within a warp."""
        s = self.storage
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{s}.{s}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        return self.asm([F32] * 4, text, constraints, [*a, *b, *c], convergent=True)

    def _descriptor(self, address, panel: int):
        """Of a tile with 128-byte swizzle: groups of eight rows are 1024 bytes apart, panels of 64 columns
        `panel` bytes.
        """
        start = self.builder.lshr(self.builder.and_(address, self.i(0x3FFFF)), self.i(4))
        layout = ir.Constant(I64, (max(panel, 16) >> 4) << 16 | (1024 >> 4) << 32 | 1 << 62)
        return self.builder.or_(self.builder.zext(start, I64), layout)

    def wgmma(self, products, in_flight: int = 0):
        """The accumulators of each product, all begun together.

        The last `in_flight` of them may still be computed on return: until `wgmma_wait` neither those
        accumulators nor registers of A may be touched.
        """
        s = self.storage
        n_out = sum(p.n // 2 for p in products)
        constraints, values = ["=f"] * n_out, []
        text = [
            "{ .reg .b64 da, db; .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
            "wgmma.fence.sync.aligned;",
        ]

        def operand(value, constraint):
            values.append(value)
            constraints.append(constraint)
            return n_out + len(values) - 1

        first = 0
        for p in products:
            for i, x in enumerate(p.acc or ()):
                operand(x, str(first + i))
            from_registers = isinstance(p.a, list)
            if from_registers:
                a = [operand(x, "r") for x in p.a]
            else:
                a = operand(self._descriptor(p.a, 0), "l")
            b = operand(self._descriptor(p.b, p.b_panel if p.by_rows_of_k else 0), "l")
            d = "{" + ",".join(f"${first + i}" for i in range(p.n // 2)) + "}"
            for k in range(p.k):
                text.append(f"add.s64 db, ${b}, {p.b_offset(k) >> 4};")
                issue = f"wgmma.mma_async.sync.aligned.m64n{p.n}k16.f32.{s}.{s} {d}, "
                accumulate = "no" if k == 0 and p.acc is None else "yes"
                if from_registers:
                    registers = "{" + ",".join(f"${i}" for i in a[4 * k : 4 * k + 4]) + "}"
                    text.append(f"{issue}{registers}, db, {accumulate}, 1, 1, {int(p.by_rows_of_k)};")
                else:
                    text.append(f"add.s64 da, ${a}, {p.a_offset(k) >> 4};")
                    text.append(f"{issue}da, db, {accumulate}, 1, 1, 0, {int(p.by_rows_of_k)};")
            if in_flight:
                text.append("wgmma.commit_group.sync.aligned;")
            first += p.n // 2
        if not in_flight:
            text.append("wgmma.commit_group.sync.aligned;")
        text.append(f"wgmma.wait_group.sync.aligned {in_flight}; }}")
        constraints.append("~{memory}")
        result = iter(self.asm([F32] * n_out, "\n".join(text), ",".join(constraints), values, True, True))
        return [[next(result) for _ in range(p.n // 2)] for p in products]

    def wgmma_wait(self, in_flight: int, values):
        """`values` (accumulators, or the registers that a product still reads) once at most `in_flight`
        groups are in flight.
        """
        types_ = [v.type for v in values]
        constraints = ["=f" if t == F32 else "=r" for t in types_] + [str(i) for i in range(len(values))]
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        return self.asm(types_, text, ",".join([*constraints, "~{memory}"]), values, True, True)

    def fence_async(self):
        """What threads have written to shared memory is visible to wgmma."""
        self.asm(None, "fence.proxy.async.shared::cta;", "~{memory}", [], True, True)

    # -- shared memory

    def shared(self, name: str):
        """The address of the block's dynamic shared memory, aligned to 1024 bytes."""
        memory = self.builder.module.globals.get(name)
        if memory is None:
            memory = ir.GlobalVariable(self.builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
            memory.align, memory.linkage = 1024, "external"
        return self.builder.ptrtoint(memory, I32)

    def store_shared(self, address, offset: int, word):
        self.asm(None, f"st.shared.b32 [$0+{offset}], $1;", "r,r,~{memory}", [address, word], True)

    def load_shared4(self, address, offset: int):
        text = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return self.asm([I32] * 4, text, "=r,=r,=r,=r,r,~{memory}", [address], True)

    def load_shared_f2(self, address, offset: int):
        return self.asm(
            [F32] * 2, f"ld.shared.v2.f32 {{$0,$1}}, [$2+{offset}];", "=f,=f,r,~{memory}", [address], True
        )

    # -- global memory; `if_gt` = (x, bound): only where x > bound, a Python int

    @staticmethod
    def _guard(text: str, position: int, bound: int) -> str:
        return f"{{ .reg .pred p; setp.gt.s32 p, ${position}, {bound}; @p {text} }}"

    def load_global4(self, address, offset: int, if_gt=None):
        """Four words; zeros where not loaded."""
        outputs, move = "=&r,=&r,=&r,=&r", "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        text = f"ld.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
        if if_gt is None:
            return self.asm([I32] * 4, text, "=r,=r,=r,=r,l,~{memory}", [address], True)
        text = move + self._guard(text, 5, if_gt[1])
        return self.asm([I32] * 4, text, f"{outputs},l,r,~{{memory}}", [address, if_gt[0]], True)

    def load_global_f(self, address, offset: int, if_gt=None):
        """One fp32; zero where not loaded."""
        text = f"ld.global.f32 $0, [$1+{offset}];"
        if if_gt is None:
            return self.asm(F32, text, "=f,l,~{memory}", [address], True)
        text = "mov.f32 $0, 0f00000000;" + self._guard(text, 2, if_gt[1])
        return self.asm(F32, text, "=&f,l,r,~{memory}", [address, if_gt[0]], True)

    def store_global4(self, address, offset: int, words, if_gt=None):
        text = f"st.global.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};"
        values, constraints = [address, *words], "l,r,r,r,r"
        if if_gt is not None:
            text, values, constraints = (
                self._guard(text, 5, if_gt[1]),
                [*values, if_gt[0]],
                constraints + ",r",
            )
        self.asm(None, text, constraints + ",~{memory}", values, True)

    def store_global_f(self, address, offset: int, x, if_gt=None):
        text, values, constraints = f"st.global.f32 [$0+{offset}], $1;", [address, x], "l,f"
        if if_gt is not None:
            text, values, constraints = (
                self._guard(text, 2, if_gt[1]),
                [*values, if_gt[0]],
                constraints + ",r",
            )
        self.asm(None, text, constraints + ",~{memory}", values, True)

    # -- asynchronous copies, global to shared

    def copy16(self, target, offset: int, source, source_offset: int, if_gt=None, zero_unless_gt=None):
        """16 bytes. `if_gt` leaves the target alone elsewhere; `zero_unless_gt` writes zeros there, and
        reads nothing.
        """
        copy = f"cp.async.cg.shared.global [$0+{offset}], [$1+{source_offset}], 16"
        values, constraints, setup = [target, source], "r,l", ""
        if zero_unless_gt is not None:
            x, bound = zero_unless_gt
            setup = f".reg .pred q; .reg .b32 n; setp.gt.s32 q, $2, {bound}; selp.b32 n, 16, 0, q;"
            copy, values, constraints = copy + ", n", [*values, x], constraints + ",r"
        text = copy + ";"
        if if_gt is not None:
            values, constraints = [*values, if_gt[0]], constraints + ",r"
            text = self._guard(text, len(values) - 1, if_gt[1])
        self.asm(None, f"{{ {setup} {text} }}", constraints + ",~{memory}", values, True)

    def commit(self):
        self.asm(None, "cp.async.commit_group;", "~{memory}", [], True)

    def wait(self, in_flight: int):
        self.asm(None, f"cp.async.wait_group {in_flight};", "~{memory}", [], True)

    # -- barriers

    def sync_warp(self):
        self.asm(None, "bar.warp.sync -1;", "~{memory}", [], True, True)

    def sync(self):
        self.asm(None, "bar.sync 0;", "~{memory}", [], True, True)


# ----------------------------------------------------------------------------
# From tile routine to intrinsic


@functools.cache
def parse_signature(signature: str):
    """'i32, f32*4 -> f32*2, f32' -> ((('i32', None), ('f32', 4)), (('f32', 2), ('f32', None)))"""

    def parse(side):
        items = (item.strip().partition("*") for item in side.split(",") if item.strip())
        return tuple((name, int(count) if count else None) for name, _, count in items)

    arguments, _, results = signature.partition("->")
    return parse(arguments), parse(results)


def _numba_type(item):
    name, count = item
    return _SCALARS[name] if count is None else types.UniTuple(_SCALARS[name], count)


class Tiles:
    """Makes tile routines callable in kernels, for one storage (f16, bf16) and instruction set (80, 90)."""

    def __init__(self, storage: str, arch: int):
        self.storage, self.arch = storage, arch
        self.address = _address
        self.thread = self.op("-> i32")(lambda e: e.thread())
        self.block = self.op("-> i32")(lambda e: e.register("ctaid.x"))
        self.uniform = self.op("i32 -> i32")(lambda e, x: e.uniform(x))
        self.udiv = self.op("i32, i32 -> i32")(lambda e, a, b: e.udiv(a, b))
        self.sync = self.op("")(lambda e: e.sync())
        self.commit = self.op("")(lambda e: e.commit())
        self.arrived = self.op("")(lambda e: e.wait(0))

    def op(self, signature: str):
        """Decorates a tile routine. Scalars are cast to the signature by numba; tiles must match it."""
        arguments, results = parse_signature(signature)
        result_type = (
            types.void
            if not results
            else _numba_type(results[0])
            if len(results) == 1
            else types.Tuple([_numba_type(r) for r in results])
        )

        def decorate(routine):
            def typing(*actual):
                return result_type(*map(_numba_type, arguments))

            def codegen(context, builder, signature, values):
                emitter = Emitter(builder, self.storage, self.arch)
                unpacked = [
                    value if count is None else [builder.extract_value(value, i) for i in range(count)]
                    for (_, count), value in zip(arguments, values, strict=True)
                ]
                result = routine(emitter, *unpacked)
                if not results:
                    return context.get_dummy_value()
                packed = [
                    value if count is None else context.make_tuple(builder, _numba_type(item), value)
                    for item, value in zip(results, [result] if len(results) == 1 else result, strict=True)
                    for _, count in [item]
                ]
                return packed[0] if len(packed) == 1 else context.make_tuple(builder, result_type, packed)

            made = intrinsic(_with_arity(typing, codegen, len(arguments)))
            made.py_func = routine  # what the cache of machine code hashes
            return made

        return decorate


def _with_arity(typing, codegen, n: int):
    """A typing function of exactly n arguments: numba reads their number from the signature."""
    names = "".join(f", a{i}" for i in range(n))
    scope = {"typing": typing, "codegen": codegen}
    exec(f"def tile_op(context{names}):\n    return typing({names[2:]}), codegen", scope)
    return scope["tile_op"]


@intrinsic
def _address(typing, array):
    """The 64-bit address of an array's first element."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), codegen
