"""Memory accesses and fast elementary functions on AMD GPUs, as LLVM IR inside numba-hip intrinsics.

The element type of an array says how it is read and written: float32; int16, which holds fp16 bits; uint16,
which holds bf16 bits. Arithmetic is always fp32. See `nbtrain.device.vector` for what each name means.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.hip.extending import intrinsic

I16, I32, I64, F16, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
V4 = ir.VectorType(I32, 4)
GLOBAL = 1  # LLVM's address space: a global access needs no look at which memory an address lies in


def element_pointer(context, builder, array_type, array, index_type, index):
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [context.cast(builder, index, index_type, types.int64)])


def storage_of(array):
    """The element type of a numba array type, or TypeError for one that is not storage."""
    if not isinstance(array, types.Array) or array.dtype not in (types.float32, types.int16, types.uint16):
        raise TypeError(f"storage is float32, int16 (fp16 bits) or uint16 (bf16 bits); got {array}")
    return array.dtype


# ----------------------------------------------------------------------------
# 16-bit numbers


def _widen(builder, storage, bits):
    """The fp32 value of 16 bits of storage."""
    if storage == types.int16:
        return builder.fpext(builder.bitcast(bits, F16), F32)
    return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), F32)


def _narrow(builder, storage, x):
    """16 bits of storage, rounded to nearest, ties to even; bf16 by hand, for want of an instruction."""
    if storage == types.int16:
        return builder.bitcast(builder.fptrunc(x, F16), I16)
    bits = builder.bitcast(x, I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
    # Adding to the bits of a NaN could carry into those of infinity or zero.
    is_nan = builder.icmp_unsigned(
        ">", builder.and_(bits, ir.Constant(I32, 0x7FFFFFFF)), ir.Constant(I32, 0x7F800000)
    )
    rounded = builder.select(is_nan, ir.Constant(I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, ir.Constant(I32, 16)), I16)


def _unpack(builder, storage, word):
    """The two fp32 values in a word of 16-bit storage."""
    high = builder.trunc(builder.lshr(word, ir.Constant(I32, 16)), I16)
    return _widen(builder, storage, builder.trunc(word, I16)), _widen(builder, storage, high)


def _pack(builder, storage, low, high):
    low, high = (builder.zext(_narrow(builder, storage, x), I32) for x in (low, high))
    return builder.or_(low, builder.shl(high, ir.Constant(I32, 16)))


# ----------------------------------------------------------------------------
# 128-bit accesses


def _load_words(builder, pointer):
    pointer = builder.addrspacecast(builder.bitcast(pointer, V4.as_pointer()), V4.as_pointer(GLOBAL))
    value = builder.load(pointer)
    value.align = 16
    return [builder.extract_element(value, ir.Constant(I32, k)) for k in range(4)]


def _store_words(builder, pointer, words):
    pointer = builder.addrspacecast(builder.bitcast(pointer, V4.as_pointer()), V4.as_pointer(GLOBAL))
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
            words = [_pack(builder, storage, *values[k : k + 2]) for k in range(0, 8, 2)]
            _store_words(builder, target, words)
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
            _store_local(
                builder, target, [_widen(builder, storage, _narrow(builder, storage, x)) for x in values]
            )
        return context.get_dummy_value()

    return types.void(dst, at, like), codegen


# ----------------------------------------------------------------------------
# One element


@intrinsic
def load(typing, src, i):
    storage_of(src)

    def codegen(context, builder, signature, args):
        storage = signature.args[0].dtype
        pointer = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        bits = builder.load(pointer)
        return bits if storage == types.float32 else _widen(builder, storage, bits)

    return types.float32(src, i), codegen


@intrinsic
def store(typing, dst, i, value):
    storage_of(dst)

    def codegen(context, builder, signature, args):
        storage = signature.args[0].dtype
        pointer = element_pointer(context, builder, signature.args[0], args[0], signature.args[1], args[1])
        x = context.cast(builder, args[2], signature.args[2], types.float32)
        builder.store(x if storage == types.float32 else _narrow(builder, storage, x), pointer)
        return context.get_dummy_value()

    return types.void(dst, i, value), codegen


# ----------------------------------------------------------------------------
# Elementary functions: one instruction each, within 1 ulp on normal numbers by AMD's ISA documents


def _unary(name):
    @intrinsic
    def function(typing, x):
        def codegen(context, builder, signature, args):
            x = context.cast(builder, args[0], signature.args[0], types.float32)
            instruction = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(F32, [F32]), f"llvm.amdgcn.{name}.f32"
            )
            return builder.call(instruction, [x])

        return types.float32(x), codegen

    return function


exp2 = _unary("exp2")
log2 = _unary("log")  # base 2, whatever its name says
rcp = _unary("rcp")
rsqrt = _unary("rsq")


def block_reduce(combine, threads: int, rows: int):
    """None: the portable form, through shared memory, is right for wavefronts of 64 and of 32."""
    return None


def block_sums(threads: int, rows: int):
    """None, as `block_reduce`."""
    return None
