"""Flash attention, forward: a loop over tiles of keys for the queries of one head that a block owns (Dao,
2023).

    S = Q K^T, masked
    m = running row maximum
    P = exp2(sm_scale log2(e) (S - m))
    O = O exp2(sm_scale log2(e) (m_old - m)) + P V

`forward_body`: 64 queries a warpgroup, which multiplies, waits, takes exponentials, multiplies, waits; the
other blocks on the multiprocessor fill its pauses. `tall_body`: a warpgroup owns two halves of 64 queries and
takes the exponentials of one half while the tensor cores multiply for the other; K and V are read half as
often, which is worth more than the registers it costs where a head has 128 columns.
"""

import math

from nbtrain.device.nvidia.flash_tiles import (
    NEGATIVE_INFINITY,
    Product,
    as_operand,
    copy_tile,
    keep_visible,
    pick,
    products,
    store_tile,
    tile_bytes,
)
from nbtrain.device.nvidia.ptx import ROW_BYTES

LN2 = math.log(2.0)


def _softmax(e, s, largest, total, o, sl):
    """(P packed, row maxima, row sums, O rescaled) with one more tile of scores."""
    p, maxima, sums, factors = [None] * len(s), [], [], []
    for half in range(2):
        at = [i for i in range(len(s)) if i // 2 % 2 == half]
        chains = [largest[half], s[at[0]]]  # two, to halve the dependency
        for j, i in enumerate(at[1:]):
            chains[j % 2] = e.fmax(chains[j % 2], s[i])
        new = e.fmax(*chains)
        new = e.fmax(new, e.shuffle_xor(new, 1))
        new = e.fmax(new, e.shuffle_xor(new, 2))
        shift = e.fmul(new, e.fsub(e.f(0.0), sl))
        factor = e.exp2(e.fma(largest[half], sl, shift))
        chains = [e.fmul(total[half], factor), None]
        for j, i in enumerate(at):
            p[i] = e.exp2(e.fma(s[i], sl, shift))
            chains[j % 2] = p[i] if chains[j % 2] is None else e.fadd(chains[j % 2], p[i])
        maxima.append(new)
        sums.append(e.fadd(*chains))
        factors.append(factor)
    return as_operand(e, p), maxima, sums, [e.fmul(x, factors[i // 2 % 2]) for i, x in enumerate(o)]


def _routines(tiles, D, rows, BN, whole):
    """(begin, mask, softmax, finish) of both kernels, for blocks of `rows` queries."""
    NS, NO = BN // 2, D // 2

    @tiles.op(f"-> f32*{NO}, f32*2, f32*2")
    def begin(e):
        return [e.f(0.0)] * NO, [e.f(NEGATIVE_INFINITY)] * 2, [e.f(0.0)] * 2

    @tiles.op(f"f32*{NS}, i32 -> f32*{NS}")
    def mask(e, s, x):
        return keep_visible(e, s, x, NEGATIVE_INFINITY, True)

    @tiles.op(f"f32*{NS}, f32*2, f32*2, f32*{NO}, f32 -> u32*{NS // 2}, f32*2, f32*2, f32*{NO}")
    def softmax(e, s, largest, total, o, sl):
        return _softmax(e, s, largest, total, o, sl)

    @tiles.op(f"f32*{NO}, f32*2, f32*2, f32, i64, i32, i32, i64, i64, i32")
    def finish(e, o, largest, total, sl, lse, left_lse, shared, out, step, left):
        inverse = []
        for half in range(2):
            t = e.fadd(total[half], e.shuffle_xor(total[half], 1))
            t = e.fadd(t, e.shuffle_xor(t, 2))
            inverse.append(e.rcp(t))
            value = e.fmul(e.fma(largest[half], sl, e.log2(t)), e.f(LN2))
            e.store_global_f(lse, half * 32, value, None if whole else (left_lse, half * 8))
        store_tile(e, o, inverse, shared, rows * ROW_BYTES, out, step, left, D, whole)

    return begin, mask, softmax, finish


def _copies(tiles, D, rows, BN, threads, whole):
    """(copy_q, copy_kv, visible): copies of the block's queries and of a tile of keys and values, and what
    makes them visible to the tensor cores once they have arrived.
    """
    KV = tile_bytes(BN, D)

    @tiles.op("i32, i64, i64, i32, i32")
    def copy_q(e, target, source, step, left, chunk):
        copy_tile(e, target, source, step, left, chunk, rows, D, threads, whole)

    @tiles.op("i32, i64, i64, i64, i32, i32")
    def copy_kv(e, target, k, v, step, left, chunk):
        copy_tile(e, target, k, step, left, chunk, BN, D, threads, whole)
        copy_tile(e, e.add(target, KV), v, step, left, chunk, BN, D, threads, whole)
        e.commit()

    @tiles.op("")
    def visible(e):
        if e.arch >= 90:
            e.fence_async()

    return copy_q, copy_kv, visible


def forward_body(tiles, D: int, W: int = 1, BN: int = 64, whole: bool = False):
    """(kernel function, threads, bytes of shared memory): W warpgroups, tiles of BN keys."""
    BM, THREADS = 64 * W, 128 * W
    STRIDE = THREADS // 8
    KV = tile_bytes(BN, D)
    Q, STAGE = tile_bytes(BM, D), 2 * KV
    KS, NS, NO = D // 16, BN // 2, D // 2
    q_panel, kv_panel = BM * ROW_BYTES, BN * ROW_BYTES
    begin, mask, softmax, finish = _routines(tiles, D, BM, BN, whole)
    copy_q, copy_kv, visible = _copies(tiles, D, BM, BN, THREADS, whole)
    address, thread, block, uniform, udiv, sync, arrived = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync, tiles.arrived
    )  # fmt: skip

    @tiles.op("-> i32")
    def shared(e):
        return e.shared("flash_forward_shared")

    @tiles.op("i32, i32, i32, i32 -> i32, i32")
    def place(e, index, heads, blocks, group):
        return pick(e, index, heads, blocks, group)

    @tiles.op(f"i32, i32 -> f32*{NS}")
    def scores(e, q, k):
        return products(e, Product(None, BN, KS, q, k, False, q_panel, kv_panel))[0]

    @tiles.op(f"f32*{NO}, u32*{NS // 2}, i32 -> f32*{NO}")
    def weigh(e, o, p, v):
        return products(e, Product(o, D, BN // 16, p, v, True, 0, kv_panel))[0]

    def flash_forward(qkv, out, lse, T, H, heads, group, sl):
        blocks = udiv(T + (BM - 1), BM)
        bh, j = place(block(), heads, blocks, group)
        b = udiv(bh, H)
        h = bh - b * H
        q0 = (blocks - 1 - j) * BM  # heaviest first
        t = thread()
        lane = t & 31
        warp = uniform(t >> 5)
        chunk = t & 7
        row = t >> 3
        stride = H * (6 * D)  # bytes from one token to the next in qkv
        step = stride * STRIDE
        source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
        k_source = source + H * (2 * D)
        v_source = k_source + H * (2 * D)
        sm = shared()
        target = sm + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)
        copy_q(target, source + q0 * stride, step, T - q0 - row, chunk)
        copy_kv(target + Q, k_source, v_source, step, T - row, chunk)

        g0 = q0 + (warp >> 2) * 64  # this warpgroup's first query
        w0 = q0 + warp * 16  # this warp's
        diff = (lane >> 2) - 2 * (lane & 3) + w0
        q = sm + (warp >> 2) * (64 * ROW_BYTES)
        o, largest, total = begin()
        last = min(q0 + BM, T)
        k0 = 0
        stage = 0
        while k0 < last:
            arrived()
            visible()
            sync()
            if k0 + BN < last:
                off = (k0 + BN) * stride
                left = T - k0 - BN - row
                copy_kv(target + Q + (STAGE - stage), k_source + off, v_source + off, step, left, chunk)
            if k0 <= g0 + 63:
                s = scores(q, sm + Q + stage)
                if k0 + (BN - 1) > g0:
                    s = mask(s, diff - k0)
                p, largest, total, o = softmax(s, largest, total, o, sl)
                o = weigh(o, p, sm + Q + KV + stage)
            stage = STAGE - stage
            k0 += BN
        sync()
        orow = H * (2 * D)
        finish(
            o, largest, total, sl, address(lse) + (bh * T + w0 + (lane >> 2)) * 4, T - w0 - (lane >> 2),
            sm + warp * (16 * ROW_BYTES),
            address(out) + (b * T + w0 + (lane >> 3)) * orow + h * (2 * D) + (lane & 7) * 16,
            orow * 4, T - w0 - (lane >> 3),
        )  # fmt: skip

    return flash_forward, THREADS, Q + 2 * STAGE


def tall_body(tiles, D: int, whole: bool = False):
    """(kernel function, threads, bytes of shared memory): one warpgroup, 128 queries, tiles of 64 keys."""
    BM, BN, THREADS, STRIDE = 128, 64, 128, 16
    KV = tile_bytes(BN, D)
    Q, STAGE = tile_bytes(BM, D), 2 * KV
    KS, NS, NO = D // 16, BN // 2, D // 2
    q_panel, kv_panel = BM * ROW_BYTES, BN * ROW_BYTES
    begin, mask, softmax, finish = _routines(tiles, D, BM, BN, whole)
    copy_q, copy_kv, visible = _copies(tiles, D, BM, BN, THREADS, whole)
    address, thread, block, uniform, udiv, sync, arrived = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync, tiles.arrived
    )  # fmt: skip

    @tiles.op("-> i32")
    def shared(e):
        return e.shared("flash_forward_shared")

    @tiles.op("i32, i32, i32, i32 -> i32, i32")
    def place(e, index, heads, blocks, group):
        return pick(e, index, heads, blocks, group)

    @tiles.op(f"i32, i32, i32 -> f32*{NS}, f32*{NS}")
    def scores(e, q, below, k):
        """Of both halves; the second is in flight on return."""
        return e.wgmma(
            (
                Product(None, BN, KS, q, k, False, q_panel, kv_panel),
                Product(None, BN, KS, below, k, False, q_panel, kv_panel),
            ),
            in_flight=1,
        )

    @tiles.op(f"f32*{NO}, u32*{NS // 2}, i32, f32*{NS} -> f32*{NO}, u32*{NS // 2}, f32*{NS}")
    def weigh_first(e, o, p, v, s):
        """O and P are in flight on return, S is there."""
        (o,) = e.wgmma((Product(o, D, BN // 16, p, v, True, 0, kv_panel),), in_flight=1)
        return o, p, e.wgmma_wait(1, s)

    @tiles.op(f"f32*{NO}, u32*{NS // 2}, i32, f32*{NO}, u32*{NS // 2} -> f32*{NO}, f32*{NO}")
    def weigh_second(e, o, p, v, first, p_first):
        (o,) = e.wgmma((Product(o, D, BN // 16, p, v, True, 0, kv_panel),))
        return o, e.wgmma_wait(0, [*first, *p_first])[:NO]

    @tiles.op(f"i32, i32 -> f32*{NS}")
    def scores_alone(e, q, k):
        return e.wgmma((Product(None, BN, KS, q, k, False, q_panel, kv_panel),))[0]

    @tiles.op(f"f32*{NO}, u32*{NS // 2}, i32 -> f32*{NO}")
    def weigh_alone(e, o, p, v):
        return e.wgmma((Product(o, D, BN // 16, p, v, True, 0, kv_panel),))[0]

    def flash_forward(qkv, out, lse, T, H, heads, group, sl):
        blocks = udiv(T + (BM - 1), BM)
        bh, j = place(block(), heads, blocks, group)
        b = udiv(bh, H)
        h = bh - b * H
        q0 = (blocks - 1 - j) * BM  # heaviest first
        t = thread()
        lane = t & 31
        warp = uniform(t >> 5)
        chunk = t & 7
        row = t >> 3
        stride = H * (6 * D)
        step = stride * STRIDE
        source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
        k_source = source + H * (2 * D)
        v_source = k_source + H * (2 * D)
        sm = shared()
        target = sm + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)
        copy_q(target, source + q0 * stride, step, T - q0 - row, chunk)
        copy_kv(target + Q, k_source, v_source, step, T - row, chunk)

        w0 = q0 + warp * 16  # this warp's first query of the first half
        diff = (lane >> 2) - 2 * (lane & 3) + w0
        below = sm + 64 * ROW_BYTES
        o1, largest1, total1 = begin()
        o2, largest2, total2 = begin()
        k0 = 0
        stage = 0
        while k0 <= q0:
            arrived()
            visible()
            sync()
            if k0 + BN < min(q0 + BM, T):
                off = (k0 + BN) * stride
                left = T - k0 - BN - row
                copy_kv(target + Q + (STAGE - stage), k_source + off, v_source + off, step, left, chunk)
            v = sm + Q + KV + stage
            s1, s2 = scores(sm, below, sm + Q + stage)
            if k0 == q0:
                s1 = mask(s1, diff - k0)
            p1, largest1, total1, o1 = softmax(s1, largest1, total1, o1, sl)
            o1, p1, s2 = weigh_first(o1, p1, v, s2)
            p2, largest2, total2, o2 = softmax(s2, largest2, total2, o2, sl)
            o2, o1 = weigh_second(o2, p2, v, o1, p1)
            stage = STAGE - stage
            k0 += BN
        arrived()
        visible()
        sync()
        if k0 < T:  # the second half's own keys
            s2 = mask(scores_alone(below, sm + Q + stage), diff - q0)
            p2, largest2, total2, o2 = softmax(s2, largest2, total2, o2, sl)
            o2 = weigh_alone(o2, p2, sm + Q + KV + stage)
        orow = H * (2 * D)
        to_lse = address(lse) + (bh * T + w0 + (lane >> 2)) * 4
        to_out = address(out) + (b * T + w0 + (lane >> 3)) * orow + h * (2 * D) + (lane & 7) * 16
        to_shared = sm + warp * (16 * ROW_BYTES)
        finish(
            o1, largest1, total1, sl, to_lse, T - w0 - (lane >> 2), to_shared, to_out, orow * 4,
            T - w0 - (lane >> 3),
        )  # fmt: skip
        sync()
        finish(
            o2, largest2, total2, sl, to_lse + 256, T - w0 - 64 - (lane >> 2), to_shared + 64 * ROW_BYTES,
            to_out + 64 * orow, orow * 4, T - w0 - 64 - (lane >> 3),
        )  # fmt: skip

    return flash_forward, THREADS, Q + 2 * STAGE
