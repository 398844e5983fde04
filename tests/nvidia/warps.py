"""Tile routines on NumPy: every value is a vector of 32 lanes, every warp a Python thread, memory one array
of bytes.

The kernels and routines are those of nbtrain.device.nvidia; only the emitter is another. It checks what a
GPU would not say: bank conflicts of ldmatrix, alignment, shared memory beyond what the kernel asked for,
and it poisons shared memory with NaN.
"""

import threading

import ml_dtypes
import numpy as np

from nbtrain.device.nvidia.ptx import ROW_BYTES, parse_signature

LANES = np.arange(32)
ROW, PAIR = LANES >> 2, (LANES & 3) * 2
STORAGE = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Memory:
    """Global memory: `add` places an array and returns its address, `get` reads it back."""

    def __init__(self):
        self.bytes = np.zeros(256, np.uint8)

    def add(self, array) -> int:
        at = len(self.bytes)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes = np.concatenate([self.bytes, data, np.full(-len(data) % 256 + 256, 0xFF, np.uint8)])
        return at

    def get(self, at, dtype, shape):
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[at : at + n].view(dtype).reshape(shape).copy()


class Block:
    """What the warps of a block share."""

    def __init__(self, memory, storage, arch, index, threads, shared_bytes):
        self.memory, self.storage, self.arch, self.index = memory, STORAGE[storage], arch, index
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.barrier = threading.Barrier(threads // 32)


class Warp:
    """The emitter of one warp; see nbtrain.device.nvidia.ptx.Emitter for what each name means."""

    def __init__(self, block: Block, warp: int):
        self.block, self.warp = block, warp
        self.storage, self.arch, self.memory, self.shared_memory = (
            block.storage,
            block.arch,
            block.memory,
            block.shared,
        )

    # -- integers and fp32

    def i(self, value):
        return value

    f = staticmethod(np.float32)
    add = add64 = staticmethod(lambda a, b: a + b)
    sub = staticmethod(lambda a, b: a - b)
    mul = staticmethod(lambda a, b: a * b)
    xor = staticmethod(lambda a, b: a ^ b)
    and_ = staticmethod(lambda a, b: a & b)
    shl = staticmethod(lambda a, b: a << b)
    shr = staticmethod(lambda a, b: a >> b)
    udiv = staticmethod(lambda a, b: a // b)
    min = staticmethod(min)
    fmax = staticmethod(np.maximum)
    fadd = staticmethod(lambda a, b: np.float32(a + b))
    fsub = staticmethod(lambda a, b: np.float32(a - b))
    fmul = staticmethod(lambda a, b: np.float32(a * b))
    fma = staticmethod(lambda a, b, c: np.float32(a * b + c))
    exp2 = staticmethod(lambda a: np.exp2(a, dtype=np.float32))
    log2 = staticmethod(lambda a: np.log2(a, dtype=np.float32))
    rcp = staticmethod(lambda a: np.float32(1) / np.float32(a))

    def select_ge(self, x, bound, a, b):
        return np.where(np.asarray(x) >= bound, a, b)

    def shuffle_xor(self, a, mask):
        return np.broadcast_to(a, 32)[LANES ^ mask]

    def _to_bits(self, x):
        return (
            np.broadcast_to(np.asarray(x, np.float32), 32)
            .astype(self.storage)
            .view(np.uint16)
            .astype(np.uint32)
        )

    def _from_bits(self, bits):
        return bits.astype(np.uint16).view(self.storage).astype(np.float32)

    def pack(self, low, high):
        return self._to_bits(low) | self._to_bits(high) << 16

    def unpack(self, word):
        return [self._from_bits(word & 0xFFFF), self._from_bits(word >> 16)]

    # -- where a thread stands

    def thread(self):
        return LANES + 32 * self.warp

    def register(self, name):
        assert name == "ctaid.x"
        return self.block.index

    def uniform(self, x):
        x = np.broadcast_to(x, 32)
        assert (x == x[0]).all()
        return int(x[0])

    def shared(self, name):
        return 0

    # -- tensor cores

    def load_matrices(self, address, offset, transposed):
        address = np.broadcast_to(address, 32) + offset
        assert (address % 16 == 0).all()
        words = []
        for m in range(4):
            rows = address[8 * m : 8 * m + 8]
            assert len(set((rows // 16 % 8).tolist())) == 8, "ldmatrix: bank conflict"
            matrix = np.stack([self.shared_memory[r : r + 16].view(np.uint16) for r in rows]).astype(
                np.uint32
            )
            matrix = matrix.T if transposed else matrix
            words.append(matrix[ROW, PAIR] | matrix[ROW, PAIR + 1] << 16)
        return words

    def _a_matrix(self, registers):
        a = np.zeros((16, 16), np.float32)
        for i, word in enumerate(registers):
            a[ROW + 8 * (i & 1), PAIR + 8 * (i >> 1)], a[ROW + 8 * (i & 1), PAIR + 8 * (i >> 1) + 1] = (
                self.unpack(word)
            )
        return a

    def mma(self, c, a, b):
        B = np.zeros((16, 8), np.float32)
        for i, word in enumerate(b):
            B[PAIR + 8 * i, ROW], B[PAIR + 8 * i + 1, ROW] = self.unpack(word)
        d = self._a_matrix(a) @ B
        return [np.float32(c[i] + d[ROW + 8 * (i >> 1), PAIR + (i & 1)]) for i in range(4)]

    def _tile(self, start, rows, columns, panel):
        """rows x columns at a tile in wgmma's swizzle: bits 7 to 9 of an address into bits 4 to 6."""
        r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        address = start + c // 64 * panel + r * ROW_BYTES + c % 64 * 2
        address ^= ((address >> 7) & 7) << 4
        return self._from_bits(self.shared_memory.view(np.uint16)[address // 2])

    def wgmma(self, products, in_flight=0):
        results = []
        for p in products:
            start = int(np.broadcast_to(p.b, 32)[0])
            assert start % 1024 == 0 and (isinstance(p.a, list) or p.a % 1024 == 0)
            total = np.zeros((16, p.n), np.float32)
            for k in range(p.k):
                if isinstance(p.a, list):
                    a = self._a_matrix(p.a[4 * k : 4 * k + 4])
                else:
                    a = self._tile(p.a + p.a_offset(k), 64, 16, 0)[16 * (self.warp % 4) :][:16]
                if p.by_rows_of_k:
                    b = self._tile(start + p.b_offset(k), 16, p.n, p.b_panel)
                else:
                    b = self._tile(start + p.b_offset(k), p.n, 16, 0).T
                total = total + a @ b
            acc = p.acc or [np.float32(0)] * (p.n // 2)
            results.append(
                [
                    np.float32(acc[i] + total[ROW + 8 * (i // 2 % 2), i // 4 * 8 + PAIR + i % 2])
                    for i in range(p.n // 2)
                ]
            )
        return results

    def wgmma_wait(self, in_flight, values):
        return values

    # -- memory

    def _words(self, memory, address, offset, n, if_gt=None, dtype=np.uint32):
        address = np.broadcast_to(address, 32) + offset
        take = np.ones(32, bool) if if_gt is None else np.broadcast_to(np.asarray(if_gt[0]) > if_gt[1], 32)
        at = np.where(take, address, 0)[:, None] + np.arange(4 * n)
        values = memory[at].view(dtype) if len(memory) else None
        return [np.where(take, values[:, i], dtype(0)) for i in range(n)]

    def load_shared4(self, address, offset):
        return self._words(self.shared_memory, address, offset, 4)

    def load_shared_f2(self, address, offset):
        return self._words(self.shared_memory, address, offset, 2, dtype=np.float32)

    def store_shared(self, address, offset, word):
        address = np.broadcast_to(address, 32) + offset
        assert len(set((address // 4 % 32).tolist())) == 32, "st.shared: bank conflict"
        self.shared_memory.view(np.uint32)[address // 4] = word

    def load_global4(self, address, offset, if_gt=None):
        return self._words(self.memory.bytes, address, offset, 4, if_gt)

    def load_global_f(self, address, offset, if_gt=None):
        return self._words(self.memory.bytes, address, offset, 1, if_gt, np.float32)[0]

    def _store(self, address, offset, words, if_gt, dtype):
        address = np.broadcast_to(address, 32) + offset
        take = np.ones(32, bool) if if_gt is None else np.broadcast_to(np.asarray(if_gt[0]) > if_gt[1], 32)
        target = self.memory.bytes.view(dtype)
        for i, word in enumerate(words):
            target[(address[take] + 4 * i) // 4] = np.broadcast_to(word, 32)[take]

    def store_global4(self, address, offset, words, if_gt=None):
        self._store(address, offset, words, if_gt, np.uint32)

    def store_global_f(self, address, offset, x, if_gt=None):
        self._store(address, offset, [x], if_gt, np.float32)

    def copy16(self, target, offset, source, source_offset, if_gt=None, zero_unless_gt=None):
        target = np.broadcast_to(target, 32) + offset
        source = np.broadcast_to(source, 32) + source_offset
        assert (target % 16 == 0).all() and (source % 16 == 0).all()
        take = np.ones(32, bool) if if_gt is None else np.broadcast_to(np.asarray(if_gt[0]) > if_gt[1], 32)
        read = np.ones(32, bool) if zero_unless_gt is None else np.broadcast_to(
            np.asarray(zero_unless_gt[0]) > zero_unless_gt[1], 32
        )  # fmt: skip
        for lane in LANES[take]:
            chunk = self.memory.bytes[source[lane] : source[lane] + 16] if read[lane] else 0
            self.shared_memory[target[lane] : target[lane] + 16] = chunk

    def commit(self):
        pass

    fence_async = sync_warp = commit

    def wait(self, in_flight):
        pass

    # -- barriers

    def sync(self):
        self.block.barrier.wait()


_current = threading.local()


class WarpTiles:
    """nbtrain.device.nvidia.ptx.Tiles for kernels that `run` calls."""

    def __init__(self, storage: str, arch: int):
        self.storage, self.arch = storage, arch
        self.address = lambda x: x
        self.thread = self.op("-> i32")(lambda e: e.thread())
        self.block = self.op("-> i32")(lambda e: e.register("ctaid.x"))
        self.uniform = self.op("i32 -> i32")(lambda e, x: e.uniform(x))
        self.udiv = self.op("i32, i32 -> i32")(lambda e, a, b: e.udiv(a, b))
        self.sync = self.op("")(lambda e: e.sync())
        self.commit = self.arrived = self.op("")(lambda e: e.commit())

    def op(self, signature):
        arguments, results = parse_signature(signature)

        def decorate(routine):
            def call(*values):
                for (_, count), value in zip(arguments, values, strict=True):
                    assert count is None or len(value) == count, (routine.__name__, count, len(value))
                values = [list(v) if count else v for (_, count), v in zip(arguments, values, strict=True)]
                result = routine(_current.warp, *values)
                for (_, count), value in zip(
                    results, [result] if len(results) == 1 else result or (), strict=True
                ):
                    assert count is None or len(value) == count, (routine.__name__, count, len(value))
                return result

            return call

        return decorate


def run(kernel, threads, shared_bytes, blocks, tiles, memory, *args):
    """Runs a kernel's blocks one after the other; integers are addresses where it wants arrays."""
    for index in range(blocks):
        block = Block(memory, tiles.storage, tiles.arch, index, threads, shared_bytes)
        errors = []

        def body(warp, block=block, errors=errors):
            _current.warp = Warp(block, warp)
            try:
                with np.errstate(all="ignore"):
                    kernel(*args)
            except BaseException as error:
                errors.append(error)
                block.barrier.abort()

        workers = [threading.Thread(target=body, args=(warp,)) for warp in range(threads // 32)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
