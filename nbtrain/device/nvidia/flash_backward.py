"""Flash attention, backward, in two kernels without atomics, so that every run gives the same bits (Dao,
2023, but split).

    P  = exp(sm_scale Q K^T - lse)          delta = rowsum(dO * O)          dS = P * (dO V^T - delta)
    dV = P^T dO          dK = sm_scale dS^T Q          dQ = sm_scale dS K

`flash_backward_dq`: a block owns 64 queries a warpgroup and loops over keys. It also leaves -lse / sm_scale
and -delta in `stats` (2, B * H, T rounded up to 128); beyond T they are 0, and so is the dO that P is
multiplied with. `flash_backward_dkv`: a block owns keys and loops over queries; accumulators of S and dP
start with those two. It multiplies S^T = K Q^T and dP^T = V dO^T: once packed, their accumulators are the A
operands of dV and dK. S and dP are multiplied twice: seven products where one kernel with atomics, or with an
exchange between blocks, needs five.

Where asked for, both leave the sums of every 16 rows of dQ, dK, dV in `sums` (B * groups, 3C), groups of 16
rows a sequence: the gradient of the bias behind qkv, without a pass of its own.
"""

from nbtrain.device.fused_attention import STATS_ROWS
from nbtrain.device.nvidia.flash_tiles import (
    NEGATIVE_INFINITY,
    Product,
    as_operand,
    copy_tile,
    keep_visible,
    pick,
    products,
    store_tile,
    sum_columns,
    tile_bytes,
)
from nbtrain.device.nvidia.ptx import ROW_BYTES


def dq_body(tiles, D: int, W: int = 1, BN: int = 64, whole: bool = False, with_sums: bool = False):
    """(kernel function, threads, bytes of shared memory): W warpgroups of queries, tiles of BN keys."""
    BM, THREADS = 64 * W, 128 * W
    assert BM <= STATS_ROWS
    STRIDE = THREADS // 8
    KV, QB = tile_bytes(BN, D), tile_bytes(BM, D)
    STAGE, KV0 = 2 * KV, 2 * QB
    KS, NS, NO = D // 16, BN // 2, D // 2
    q_panel, kv_panel = BM * ROW_BYTES, BN * ROW_BYTES
    address, thread, block, uniform, udiv, sync, arrived = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync, tiles.arrived
    )  # fmt: skip

    @tiles.op("-> i32")
    def shared(e):
        return e.shared("flash_backward_dq_shared")

    @tiles.op("i32, i32, i32, i32 -> i32, i32")
    def place(e, index, heads, blocks, group):
        return pick(e, index, heads, blocks, group)

    @tiles.op("i32, i64, i64, i64, i64, i32, i32")
    def copy_q(e, target, q, q_step, dout, o_step, left, chunk):
        copy_tile(e, target, q, q_step, left, chunk, BM, D, THREADS, whole)
        copy_tile(e, e.add(target, QB), dout, o_step, left, chunk, BM, D, THREADS, whole)

    @tiles.op("i32, i64, i64, i64, i32, i32")
    def copy_kv(e, target, k, v, step, left, chunk):
        copy_tile(e, target, k, step, left, chunk, BN, D, THREADS, whole)
        copy_tile(e, e.add(target, KV), v, step, left, chunk, BN, D, THREADS, whole)
        e.commit()

    @tiles.op("")
    def visible(e):
        if e.arch >= 90:
            e.fence_async()

    @tiles.op("i64, i64, i64, i64, i64, i64, i32, f32 -> f32*2, f32*2")
    def statistics(e, out, dout, eight_rows, lse, nl, nd, left, minus_inverse_scale):
        """(-lse / sm_scale, -delta) of the lane's two rows, and into `nl` and `nd`. Four lanes share it."""
        lane = e.and_(e.thread(), 3)
        scores, deltas = [], []
        for half in range(2):
            total = e.f(0.0)
            for first in range(0, D // 8, 4):
                guard = None if whole else (left, half * 8)
                if D // 8 - first < 4:
                    chunks = e.sub(e.i(D // 8 - first - 1), lane)
                    guard = (e.select_ge(chunks, 0, e.i(64) if whole else left, e.i(0)), half * 8)
                x = e.load_global4(out, first * 16, guard)
                y = e.load_global4(dout, first * 16, guard)
                for u, v in zip(x, y, strict=True):
                    for a, b in zip(e.unpack(u), e.unpack(v), strict=True):
                        total = e.fma(a, b, total)
            total = e.fadd(total, e.shuffle_xor(total, 1))
            total = e.fadd(total, e.shuffle_xor(total, 2))
            delta = e.fsub(e.f(0.0), total)
            score = e.fmul(
                e.load_global_f(lse, half * 32, None if whole else (left, half * 8)), minus_inverse_scale
            )
            e.store_global_f(nl, half * 32, score)
            e.store_global_f(nd, half * 32, delta)
            scores.append(score)
            deltas.append(delta)
            out, dout = e.add64(out, eight_rows), e.add64(dout, eight_rows)
        return scores, deltas

    @tiles.op(f"-> f32*{NO}")
    def zeros(e):
        return [e.f(0.0)] * NO

    @tiles.op(f"i32, i32, i32, i32, f32*2 -> f32*{NS}, f32*{NS}")
    def scores_and_dp(e, q, k, dout, v, nd):
        return products(
            e,
            Product(None, BN, KS, q, k, False, q_panel, kv_panel),
            Product([nd[i // 2 % 2] for i in range(NS)], BN, KS, dout, v, False, q_panel, kv_panel),
        )

    @tiles.op(f"f32*{NS}, i32 -> f32*{NS}")
    def mask(e, s, x):
        return keep_visible(e, s, x, NEGATIVE_INFINITY, True)

    @tiles.op(f"f32*{NO}, f32*{NS}, f32*{NS}, f32*2, f32, i32 -> f32*{NO}")
    def add_dq(e, acc, s, dp, nl, sl, k):
        shift = [e.fmul(x, sl) for x in nl]
        ds = [e.fmul(e.exp2(e.fma(s[i], sl, shift[i // 2 % 2])), dp[i]) for i in range(NS)]
        return products(e, Product(acc, D, BN // 16, as_operand(e, ds), k, True, 0, kv_panel))[0]

    @tiles.op(f"f32*{NO}, f32, i32, i64, i64, i32")
    def store(e, acc, scale, shared, target, step, left):
        store_tile(e, acc, [scale, scale], shared, q_panel, target, step, left, D, whole)

    @tiles.op(f"f32*{NO}, f32, i64, i32")
    def add_up(e, acc, scale, target, left):
        if with_sums:
            sum_columns(e, acc, scale, target, left, D)

    def flash_backward_dq(
        qkv,
        out,
        dout,
        lse,
        stats,
        dqkv,
        sums,
        T,
        padded,
        groups,
        H,
        heads,
        group,
        sl,
        scale,
        minus_inverse_scale,
    ):
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
        orow = H * (2 * D)
        stride = 3 * orow
        step = stride * STRIDE
        source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
        k_source = source + orow
        dout_head = address(dout) + (b * T + q0) * orow + h * (2 * D)
        sm = shared()
        target = sm + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)
        copy_q(
            target,
            source + q0 * stride,
            step,
            dout_head + row * orow + chunk * 16,
            orow * STRIDE,
            T - q0 - row,
            chunk,
        )
        copy_kv(target + KV0, k_source, k_source + orow, step, T - row, chunk)
        g0 = q0 + (warp >> 2) * 64
        w0 = q0 + warp * 16
        r0 = w0 + (lane >> 2)
        diff = r0 - 2 * (lane & 3)
        at = (r0 - q0) * orow + (lane & 3) * 16
        nl_row = address(stats) + (bh * padded + r0) * 4
        nl, nd = statistics(
            address(out) + (b * T + q0) * orow + h * (2 * D) + at, dout_head + at, orow * 8,
            address(lse) + (bh * T + r0) * 4,
            nl_row, nl_row + heads * padded * 4, T - r0, minus_inverse_scale,
        )  # fmt: skip
        q = sm + (warp >> 2) * (64 * ROW_BYTES)
        do = q + QB
        acc = zeros()
        last = min(q0 + BM, T)
        k0 = 0
        stage = 0
        while k0 < last:
            arrived()
            visible()
            sync()
            if k0 + BN < last:
                k_source += BN * stride
                copy_kv(
                    target + KV0 + (STAGE - stage), k_source, k_source + orow, step, T - k0 - BN - row, chunk
                )  # fmt: skip
            if k0 <= g0 + 63:
                kv = sm + KV0 + stage
                s, dp = scores_and_dp(q, kv, do, kv + KV, nd)
                if k0 + (BN - 1) > g0:
                    s = mask(s, diff - k0)
                acc = add_dq(acc, s, dp, nl, sl, kv)
            stage = STAGE - stage
            k0 += BN
        of_sixteen = address(sums) + ((b * groups + (w0 >> 4)) * (3 * H * D) + h * D + 2 * (lane & 3)) * 4
        add_up(acc, scale, of_sixteen, groups - (w0 >> 4))
        sync()
        gradient = address(dqkv) + (b * T + w0 + (lane >> 3)) * stride + h * (2 * D) + (lane & 7) * 16
        store(acc, scale, sm + warp * (16 * ROW_BYTES), gradient, stride * 4, T - w0 - (lane >> 3))

    return flash_backward_dq, THREADS, KV0 + 2 * STAGE


def dkv_body(tiles, D: int, W: int = 1, whole: bool = False, with_sums: bool = False):
    """(kernel function, threads, bytes of shared memory): W warpgroups of keys, tiles of 64 queries."""
    BK, BQ, THREADS = 64 * W, 64, 128 * W
    STRIDE = THREADS // 8
    KB, QB = tile_bytes(BK, D), tile_bytes(BQ, D)
    STAGE, ST0 = 2 * QB, 2 * KB
    STATS = ST0 + 2 * STAGE  # for each stage 64 times -lse / sm_scale and 64 times -delta
    KS, NS, NO = D // 16, BQ // 2, D // 2
    k_panel, q_panel = BK * ROW_BYTES, BQ * ROW_BYTES
    address, thread, block, uniform, udiv, sync, arrived = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync, tiles.arrived
    )  # fmt: skip

    @tiles.op("-> i32")
    def shared(e):
        return e.shared("flash_backward_dkv_shared")

    @tiles.op("i32, i32, i32, i32 -> i32, i32")
    def place(e, index, heads, blocks, group):
        return pick(e, index, heads, blocks, group)

    @tiles.op("i32, i64, i64, i64, i32, i32")
    def copy_kv(e, target, k, v, step, left, chunk):
        copy_tile(e, target, k, step, left, chunk, BK, D, THREADS, whole)
        copy_tile(e, e.add(target, KB), v, step, left, chunk, BK, D, THREADS, whole)

    @tiles.op("i32, i64, i64, i64, i64, i32, i32, i32, i64")
    def copy_q(e, target, q, q_step, dout, o_step, left, chunk, stats_target, stats):
        copy_tile(e, target, q, q_step, left, chunk, BQ, D, THREADS, whole)
        copy_tile(e, e.add(target, QB), dout, o_step, left, chunk, BQ, D, THREADS, whole)
        e.copy16(stats_target, 0, stats, 0, if_gt=(e.sub(e.i(32), e.thread()), 0))
        e.commit()

    @tiles.op("")
    def visible(e):
        if e.arch >= 90:
            e.fence_async()

    @tiles.op(f"-> f32*{NO}")
    def zeros(e):
        return [e.f(0.0)] * NO

    @tiles.op(f"i32, i32, i32, i32, i32 -> f32*{NS}, f32*{NS}")
    def scores_and_dp(e, k, q, v, dout, stats):
        """S^T - lse / sm_scale and dP^T - delta: both constants belong to a query, here a column."""

        def columns(offset):
            acc = []
            for n in range(BQ // 8):
                x, y = e.load_shared_f2(stats, offset + n * 32)
                acc += [x, y, x, y]
            return acc

        return products(
            e,
            Product(columns(0), BQ, KS, k, q, False, k_panel, q_panel),
            Product(columns(4 * BQ), BQ, KS, v, dout, False, k_panel, q_panel),
        )

    @tiles.op(f"f32*{NS}, f32 -> f32*{NS}")
    def probabilities(e, s, sl):
        return [e.exp2(e.fmul(x, sl)) for x in s]

    @tiles.op(f"f32*{NS}, i32 -> f32*{NS}")
    def mask(e, p, x):
        return keep_visible(e, p, x, 0.0, False)

    @tiles.op(f"f32*{NO}, f32*{NS}, i32, f32*{NO}, f32*{NS}, i32 -> f32*{NO}, f32*{NO}")
    def add_dv_dk(e, dv, p, dout, dk, dp, q):
        ds = [e.fmul(x, y) for x, y in zip(p, dp, strict=True)]
        return products(
            e,
            Product(dv, D, BQ // 16, as_operand(e, p), dout, True, 0, q_panel),
            Product(dk, D, BQ // 16, as_operand(e, ds), q, True, 0, q_panel),
        )

    @tiles.op(f"f32*{NO}, f32, i32, i64, i64, i32")
    def store(e, acc, scale, shared, target, step, left):
        store_tile(e, acc, [scale, scale], shared, k_panel, target, step, left, D, whole)

    @tiles.op(f"f32*{NO}, f32, i64, i32")
    def add_up(e, acc, scale, target, left):
        if with_sums:
            sum_columns(e, acc, scale, target, left, D)

    def flash_backward_dkv(
        qkv, dout, stats, dqkv, sums, T, padded, groups, H, heads, group, sl, scale, one
    ):  # fmt: skip
        blocks = udiv(T + (BK - 1), BK)
        bh, j = place(block(), heads, blocks, group)
        b = udiv(bh, H)
        h = bh - b * H
        key0 = j * BK  # the first keys have the most queries: heaviest first
        t = thread()
        lane = t & 31
        warp = uniform(t >> 5)
        chunk = t & 7
        row = t >> 3
        orow = H * (2 * D)
        stride = 3 * orow
        step = stride * STRIDE
        source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
        d_source = address(dout) + (b * T + row) * orow + h * (2 * D) + chunk * 16
        stats_source = address(stats) + (bh * padded + (t & 15) * 4 + ((t >> 4) & 1) * (heads * padded)) * 4
        sm = shared()
        target = sm + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)
        stats_target = sm + STATS + (t & 31) * 16
        source += key0 * stride
        d_source += key0 * orow
        stats_source += key0 * 4
        k_source = source + orow
        copy_kv(target, k_source, k_source + orow, step, T - key0 - row, chunk)
        copy_q(
            target + ST0, source, step, d_source, orow * STRIDE, T - key0 - row, chunk,
            stats_target, stats_source,
        )  # fmt: skip
        wk0 = key0 + warp * 16
        g0 = key0 + (warp >> 2) * 64
        diff = 2 * (lane & 3) - (lane >> 2) - wk0
        k = sm + (warp >> 2) * (64 * ROW_BYTES)
        v = k + KB
        dk = zeros()
        dv = zeros()
        q0 = key0
        slot = 0
        while q0 < T:
            arrived()
            visible()
            sync()
            if q0 + BQ < T:
                source += BQ * stride
                d_source += BQ * orow
                stats_source += 4 * BQ
                copy_q(
                    target + ST0 + (slot ^ 1) * STAGE, source, step, d_source, orow * STRIDE,
                    T - q0 - BQ - row, chunk, stats_target + (slot ^ 1) * 512, stats_source,
                )  # fmt: skip
            if q0 + 63 >= g0:
                q = sm + ST0 + slot * STAGE
                s, dp = scores_and_dp(k, q, v, q + QB, sm + STATS + slot * 512 + (lane & 3) * 8)
                p = probabilities(s, sl)
                if q0 < g0 + 63:
                    p = mask(p, diff + q0)
                dv, dk = add_dv_dk(dv, p, q + QB, dk, dp, q)
            slot ^= 1
            q0 += BQ
        of_sixteen = address(sums) + ((b * groups + (wk0 >> 4)) * (3 * H * D) + h * D + 2 * (lane & 3)) * 4
        add_up(dk, scale, of_sixteen + 4 * H * D, groups - (wk0 >> 4))
        add_up(dv, one, of_sixteen + 8 * H * D, groups - (wk0 >> 4))
        sync()
        gradient = address(dqkv) + (b * T + wk0 + (lane >> 3)) * stride + h * (2 * D) + (lane & 7) * 16
        left = T - wk0 - (lane >> 3)
        store(dk, scale, sm + warp * (16 * ROW_BYTES), gradient + orow, stride * 4, left)
        store(dv, one, sm + KB + warp * (16 * ROW_BYTES), gradient + 2 * orow, stride * 4, left)

    return flash_backward_dkv, THREADS, STATS + 2 * 512
