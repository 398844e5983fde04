"""Memory accesses and fast elementary functions on NVIDIA GPUs, as LLVM IR and PTX inside numba-cuda
intrinsics.

The element type of an array says how it is read and written: float32; int16, which holds fp16 bits; uint16,
which holds bf16 bits. Arithmetic is always fp32. See `nbtrain.device.vector` for what each name means.
"""

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
V4 = ir.VectorType(I32, 4)
GLOBAL, SHARED = 1, 3  # LLVM's address spaces
compiling_for = (9, 0)  # compute capability; `compile_for` sets it


def _asm(builder, result, arguments, text, constraints, values):
    return builder.call(ir.InlineAsm(ir.FunctionType(result, arguments), text, constraints), values)


def element_pointer(context, builder, array_type, array, index_type, index):
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [context.cast(builder, index, index_type, types.int64)])


def storage_of(array):
    """The element type of a numba array type, or TypeError for one that is not storage."""
    if not isinstance(array, types.Array) or array.dtype not in (types.float32, types.int16, types.uint16):
        raise TypeError(f"storage is float32, int16 (fp16 bits) or uint16 (bf16 bits); got {array}")
    return array.dtype


# ----------------------------------------------------------------------------
# One 32-bit word: two 16-bit numbers


def _half_to_float(builder, bits):
    return _asm(builder, F32, [I16], "cvt.f32.f16 $0, $1;", "=f,h", [bits])


def _unpack(builder, storage, word):
    """The two fp32 values in a word of 16-bit storage."""
    if storage == types.int16:
        high = builder.trunc(builder.lshr(word, ir.Constant(I32, 16)), I16)
        return _half_to_float(builder, builder.trunc(word, I16)), _half_to_float(builder, high)
    low = builder.shl(word, ir.Constant(I32, 16))
    return builder.bitcast(low, F32), builder.bitcast(builder.and_(word, ir.Constant(I32, 0xFFFF0000)), F32)


def _pack(builder, storage, low, high):
    """A word of 16-bit storage, rounded to nearest, ties to even."""
    name = "f16x2" if storage == types.int16 else "bf16x2"
    if compiling_for >= (8, 0):
        return _asm(builder, I32, [F32, F32], f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f", [high, low])
    if storage == types.uint16:
        raise TypeError("bf16 needs compute capability 8.0; train in fp16 on this GPU")
    low, high = (_asm(builder, I16, [F32], "cvt.rn.f16.f32 $0, $1;", "=h,f", [x]) for x in (low, high))
    return builder.or_(builder.zext(low, I32), builder.shl(builder.zext(high, I32), ir.Constant(I32, 16)))


# ----------------------------------------------------------------------------
# 128-bit accesses


def _words_pointer(builder, pointer, space):
    return builder.addrspacecast(builder.bitcast(pointer, V4.as_pointer()), V4.as_pointer(space))


def _load_words(builder, pointer, space=GLOBAL):
    value = builder.load(_words_pointer(builder, pointer, space))
    value.align = 16
    return [builder.extract_element(value, ir.Constant(I32, k)) for k in range(4)]


def _store_words(builder, pointer, words):
    pointer = _words_pointer(builder, pointer, GLOBAL)
    value = ir.Constant(V4, ir.Undefined)
    for k, word in enumerate(words):
        value = builder.insert_element(value, word, ir.Constant(I32, k))
    builder.store(value, pointer).align = 16


def _store_local(builder, pointer, values):
    for k, value in enumerate(values):
        builder.store(value, builder.gep(pointer, [ir.Constant(I64, k)]))


def _load_local(builder, pointer, n):
    return [builder.load(builder.gep(pointer, [ir.Constant(I64, k)])) for k in range(n)]


@intrinsic
def load8(typing, dst, at, src, i, count):
    storage_of(src)

    def codegen(context, builder, signature, args):
        storage = signature.args[2].dtype
        source = element_pointer(context, builder, signature.args[2], args[2], signature.args[3], args[3])
        target = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        words = _load_words(builder, source)
        if storage == types.float32:
            words += _load_words(builder, builder.gep(source, [ir.Constant(I64, 4)]))
            values = [builder.bitcast(word, F32) for word in words]
        else:
            values = [value for word in words for value in _unpack(builder, storage, word)]
        _store_local(builder, target, values)
        return context.get_dummy_value()

    return types.void(dst, at, src, i, count), codegen


@intrinsic
def store8(typing, dst, i, src, at, count):
    storage_of(dst)

    def codegen(context, builder, signature, args):
        storage = signature.args[0].dtype
        target = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        source = element_pointer(context, builder, signature.args[2], args[2], signature.args[3], args[3])
        values = _load_local(builder, source, 8)
        if storage == types.float32:
            words = [builder.bitcast(value, I32) for value in values]
            _store_words(builder, target, words[:4])
            _store_words(builder, builder.gep(target, [ir.Constant(I64, 4)]), words[4:])
        else:
            _store_words(
                builder, target, [_pack(builder, storage, *values[k : k + 2]) for k in range(0, 8, 2)]
            )
        return context.get_dummy_value()

    return types.void(dst, i, src, at, count), codegen


@intrinsic
def round8(typing, dst, at, like):
    storage_of(like)

    def codegen(context, builder, signature, args):
        storage = signature.args[2].dtype
        if storage != types.float32:
            target = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
            values = _load_local(builder, target, 8)
            words = [_pack(builder, storage, *values[k : k + 2]) for k in range(0, 8, 2)]
            _store_local(
                builder, target, [value for word in words for value in _unpack(builder, storage, word)]
            )
        return context.get_dummy_value()

    return types.void(dst, at, like), codegen


# ----------------------------------------------------------------------------
# From global to shared memory, past the registers: the copy runs while the thread goes on. From compute
# capability 8.0 on


def shared_words(n: int):
    """A device function: `n` uint32 of the block's shared memory at a multiple of 16 bytes; 0: all that come
    with the launch. (numba's shared.array cannot be returned from a device function.)"""
    kind = types.Array(types.uint32, 1, "C")

    def slots(typing):
        def codegen(context, builder, signature, args):
            memory = ir.GlobalVariable(
                builder.module, ir.ArrayType(I32, n), builder.module.get_unique_name("slots"), SHARED
            )
            memory.align = 16
            if n:
                memory.linkage, memory.initializer = "internal", ir.Constant(memory.value_type, ir.Undefined)
            else:
                memory.linkage = "external"
            array = context.make_array(kind)(context, builder)
            array.data = builder.addrspacecast(
                builder.bitcast(memory, I32.as_pointer(SHARED)), I32.as_pointer()
            )
            return array._getvalue()

        return kind(), codegen

    slots.__name__ = f"slots_{n}"  # by which compiled kernels on disk are told apart
    return intrinsic(slots)


@intrinsic
def fetch8(typing, words, k, src, i):
    storage_of(src)

    def codegen(context, builder, signature, args):
        target = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        source = element_pointer(context, builder, signature.args[2], args[2], signature.args[3], args[3])
        target, source = _words_pointer(builder, target, SHARED), _words_pointer(builder, source, GLOBAL)
        text = "cp.async.cg.shared.global [$0], [$1], 16;"
        kind = ir.FunctionType(ir.VoidType(), [I32, I64])
        copy = ir.InlineAsm(kind, text, "r,l,~{memory}", side_effect=True)
        builder.call(copy, [builder.ptrtoint(target, I32), builder.ptrtoint(source, I64)])
        return context.get_dummy_value()

    return types.void(words, k, src, i), codegen


@intrinsic
def await_fetches(typing):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, "cp.async.wait_all;", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def unpack8(typing, dst, at, words, k, like):
    """dst[at : at + 8] = the numbers, in the storage of `like`, that fetch8 left in words[k : k + 4]."""
    storage_of(like)

    def codegen(context, builder, signature, args):
        storage = signature.args[4].dtype
        target = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        source = element_pointer(context, builder, signature.args[2], args[2], signature.args[3], args[3])
        words = _load_words(builder, source, SHARED)
        _store_local(builder, target, [value for word in words for value in _unpack(builder, storage, word)])
        return context.get_dummy_value()

    return types.void(dst, at, words, k, like), codegen


# ----------------------------------------------------------------------------
# One element


@intrinsic
def load(typing, src, i):
    storage_of(src)

    def codegen(context, builder, signature, args):
        storage = signature.args[0].dtype
        pointer = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        bits = builder.load(pointer)
        if storage == types.float32:
            return bits
        if storage == types.int16:
            return _half_to_float(builder, bits)
        return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), F32)

    return types.float32(src, i), codegen


@intrinsic
def store(typing, dst, i, value):
    storage_of(dst)

    def codegen(context, builder, signature, args):
        storage = signature.args[0].dtype
        pointer = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        x = context.cast(builder, args[2], signature.args[2], types.float32)
        if storage == types.float32:
            builder.store(x, pointer)
        else:
            word = _pack(builder, storage, x, ir.Constant(F32, 0.0))
            builder.store(builder.trunc(word, I16), pointer)
        return context.get_dummy_value()

    return types.void(dst, i, value), codegen


# ----------------------------------------------------------------------------
# Elementary functions: one instruction each, relative error below 2e-7 on normal numbers


def _unary(instruction):
    @intrinsic
    def function(typing, x):
        def codegen(context, builder, signature, args):
            x = context.cast(builder, args[0], signature.args[0], types.float32)
            return _asm(builder, F32, [F32], f"{instruction}.f32 $0, $1;", "=f,f", [x])

        return types.float32(x), codegen

    return function


exp2 = _unary("ex2.approx.ftz")
log2 = _unary("lg2.approx.ftz")
rcp = _unary("rcp.approx.ftz")
rsqrt = _unary("rsqrt.approx.ftz")

# ----------------------------------------------------------------------------
# Reductions by shuffles

WARP = 32
_ALL_LANES = 0xFFFFFFFF


def block_reduce(combine, threads: int, rows: int):
    """The shuffle form of `nbtrain.device.vector.block_sum` and `block_max`, or None where warps do not fit
    the row."""
    device_function = cuda.jit(device=True, fastmath=True)
    combine = device_function(combine)
    if threads < WARP and WARP % threads:
        return None
    if threads > WARP and threads % WARP:
        return None
    lanes, warps = min(threads, WARP) // 2, max(1, threads // WARP)

    @device_function
    def within_warp(value):
        distance = lanes
        while distance > 0:
            value = combine(value, cuda.shfl_xor_sync(_ALL_LANES, value, distance))
            distance >>= 1
        return value

    if warps == 1:
        return within_warp

    @device_function
    def across_warps(value):
        buf = cuda.shared.array((rows, warps), types.float32)
        value = within_warp(value)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        cuda.syncthreads()  # buf may still be read from the call before
        if x % WARP == 0:
            buf[y, x // WARP] = value
        cuda.syncthreads()
        result = buf[y, 0]
        for w in range(1, warps):
            result = combine(result, buf[y, w])
        return result

    return across_warps


def block_sums(threads: int, rows: int):
    """The shuffle form of `nbtrain.device.vector.block_sums` for several warps a row: both sums behind the
    barriers of one. Else None."""
    if threads % WARP or threads == WARP:
        return None
    warps = threads // WARP
    device_function = cuda.jit(device=True, fastmath=True)

    @device_function
    def both(a, b):
        buf = cuda.shared.array((rows, warps, 2), types.float32)
        distance = WARP // 2
        while distance > 0:
            a += cuda.shfl_xor_sync(_ALL_LANES, a, distance)
            b += cuda.shfl_xor_sync(_ALL_LANES, b, distance)
            distance >>= 1
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        cuda.syncthreads()  # buf may still be read from the call before
        if x % WARP == 0:
            buf[y, x // WARP, 0] = a
            buf[y, x // WARP, 1] = b
        cuda.syncthreads()
        a, b = buf[y, 0, 0], buf[y, 0, 1]
        for w in range(1, warps):
            a += buf[y, w, 0]
            b += buf[y, w, 1]
        return a, b

    return both
