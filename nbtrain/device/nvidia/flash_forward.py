"""Flash attention, forward: one block for 64 queries a warpgroup of one head, a loop over tiles of keys
(Dao, 2023).

S = Q K^T, masked;  m = running row maximum;  P = exp2(sm_scale log2(e) (S - m));  O = O exp2(…(m_old -
m)) + P V

`forward_body` has every thread copy and compute, with a barrier for the block at each tile of keys. In
`pipelined_body` one more warp only copies, and hands tiles over by mbarriers, so that warpgroups drift
apart: one multiplies while another takes exponentials.
"""

import math

from nbtrain.device.nvidia.flash_tiles import (
    NEGATIVE_INFINITY,
    Product,
    as_operand,
    copy_tile,
    keep_visible,
    load_a,
    pick,
    products,
    store_tile,
    tile_bytes,
)
from nbtrain.device.nvidia.ptx import ROW_BYTES

LN2 = math.log(2.0)


def _softmax(e, s, largest, total, sl):
    """(P, row maxima, row sums, factor for what was summed before) of one more tile of scores."""
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
    return p, maxima, sums, factors


def _rescale(e, o, factors):
    return [e.fmul(x, factors[i // 2 % 2]) for i, x in enumerate(o)]


def _routines(tiles, D, W, BN, whole, q_in_registers, shared_name):
    """The tile routines of the forward kernels."""
    BM, KS, NS, NO = 64 * W, D // 16, BN // 2, D // 2
    q_panel, kv_panel = BM * ROW_BYTES, BN * ROW_BYTES
    q_type = f"u32*{4 * KS}" if q_in_registers else "i32"

    @tiles.op("-> i32")
    def shared(e):
        return e.shared(shared_name)

    @tiles.op("i32, i32, i32, i32 -> i32, i32")
    def place(e, index, heads, blocks, group):
        return pick(e, index, heads, blocks, group)

    @tiles.op(f"i32 -> {q_type}")
    def query(e, address):
        return load_a(e, address, KS, q_panel) if q_in_registers else address

    @tiles.op(f"-> f32*{NO}, f32*2, f32*2")
    def begin(e):
        return [e.f(0.0)] * NO, [e.f(NEGATIVE_INFINITY)] * 2, [e.f(0.0)] * 2

    @tiles.op(f"{q_type}, i32 -> f32*{NS}")
    def scores(e, q, k):
        return products(e, Product(None, BN, KS, q, k, False, q_panel, kv_panel))[0]

    @tiles.op(f"f32*{NS}, i32 -> f32*{NS}")
    def mask(e, s, x):
        return keep_visible(e, s, x, NEGATIVE_INFINITY, True)

    @tiles.op(f"f32*{NS}, f32*2, f32*2, f32*{NO}, f32 -> u32*{NS // 2}, f32*2, f32*2, f32*{NO}")
    def softmax(e, s, largest, total, o, sl):
        p, largest, total, factors = _softmax(e, s, largest, total, sl)
        return as_operand(e, p), largest, total, _rescale(e, o, factors)

    @tiles.op(f"f32*{NO}, u32*{NS // 2}, i32 -> f32*{NO}")
    def weigh(e, o, p, v):
        return products(e, Product(o, D, BN // 16, p, v, True, 0, kv_panel))[0]

    @tiles.op(f"f32*{NO}, f32*2, f32*2, f32, i64, i32, i32, i64, i64, i32")
    def finish(e, o, largest, total, sl, lse, rows, shared, out, step, left):
        inverse = []
        for half in range(2):
            t = e.fadd(total[half], e.shuffle_xor(total[half], 1))
            t = e.fadd(t, e.shuffle_xor(t, 2))
            inverse.append(e.rcp(t))
            value = e.fmul(e.fma(largest[half], sl, e.log2(t)), e.f(LN2))
            e.store_global_f(lse, half * 32, value, None if whole else (rows, half * 8))
        store_tile(e, o, inverse, shared, q_panel, out, step, left, D, whole)

    P = f"u32*{NS // 2}"

    @tiles.op(f"{q_type}, i32, f32*{NO}, {P}, i32 -> f32*{NS}, f32*{NO}, {P}")
    def scores_and_weigh(e, q, k, o, p, v):
        """Both in flight; the scores are there on return, O and P still belong to the tensor core."""
        s, o = e.wgmma(
            (
                Product(None, BN, KS, q, k, False, q_panel, kv_panel),
                Product(o, D, BN // 16, p, v, True, 0, kv_panel),
            ),
            wait=None,
            groups=True,
        )
        return e.wgmma_wait(1, s), o, p

    @tiles.op(f"f32*{NS}, f32*2, f32*2, f32, f32*{NO}, {P} -> {P}, f32*2, f32*2, f32*{NO}")
    def softmax_then_rescale(e, s, largest, total, sl, o, p):
        new, largest, total, factors = _softmax(e, s, largest, total, sl)
        done = e.wgmma_wait(0, [*o, *p])
        return as_operand(e, new), largest, total, _rescale(e, done[:NO], factors)

    return (
        shared,
        place,
        query,
        begin,
        scores,
        mask,
        softmax,
        weigh,
        finish,
        scores_and_weigh,
        softmax_then_rescale,
    )


def forward_body(tiles, D: int, W: int = 1, BN: int = 64, whole: bool = False, q_in_registers: bool = False):
    """(kernel function, threads, bytes of shared memory): W warpgroups, tiles of BN keys."""
    BM, THREADS = 64 * W, 128 * W
    STRIDE = THREADS // 8
    KV = tile_bytes(BN, D)
    Q, STAGE = tile_bytes(BM, D), 2 * KV
    wgmma = tiles.arch >= 90
    (
        shared,
        place,
        query,
        begin,
        scores,
        mask,
        softmax,
        weigh,
        finish,
        scores_and_weigh,
        softmax_then_rescale,
    ) = _routines(tiles, D, W, BN, whole, q_in_registers, "flash_forward_shared")
    address, thread, block, uniform, udiv = (
        tiles.address,
        tiles.thread,
        tiles.block,
        tiles.uniform,
        tiles.udiv,
    )
    sync, arrived = tiles.sync, tiles.arrived

    @tiles.op("i32, i64, i64, i32, i32")
    def copy_q(e, target, source, step, left, chunk):
        copy_tile(e, target, source, step, left, chunk, BM, D, THREADS, whole)

    @tiles.op("i32, i64, i64, i64, i32, i32")
    def copy_kv(e, target, k, v, step, left, chunk):
        copy_tile(e, target, k, step, left, chunk, BN, D, THREADS, whole)
        copy_tile(e, e.add(target, KV), v, step, left, chunk, BN, D, THREADS, whole)
        e.commit()

    @tiles.op("")
    def visible(e):
        if wgmma:
            e.fence_async()

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
        arrived()
        visible()
        sync()
        q = query(sm + (warp >> 2) * (64 * ROW_BYTES))
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
                copy_kv(
                    target + Q + (STAGE - stage),
                    k_source + off,
                    v_source + off,
                    step,
                    T - k0 - BN - row,
                    chunk,
                )
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


def pipelined_body(
    tiles,
    D: int,
    W: int = 2,
    BN: int = 64,
    stages: int = 3,
    whole: bool = False,
    q_in_registers: bool = False,
    overlap: bool = False,
):
    """`forward_body` with a warp that copies. `overlap`: the next scores are multiplied while P V is."""
    assert stages >= 2 and (W - 1) * 64 <= stages * BN  # a warpgroup that needs no more tiles frees none
    BM, THREADS, STRIDE = 64 * W, 128 * W + 32, 4
    KV = tile_bytes(BN, D)
    Q, STAGE = tile_bytes(BM, D), 2 * KV
    BARRIERS = Q + stages * STAGE  # queries; then of each stage: keys, values, free
    KEYS, VALUES, FREE = BARRIERS + 8, BARRIERS + 8 + 8 * stages, BARRIERS + 8 + 16 * stages
    (
        shared,
        place,
        query,
        begin,
        scores,
        mask,
        softmax,
        weigh,
        finish,
        scores_and_weigh,
        softmax_then_rescale,
    ) = _routines(tiles, D, W, BN, whole, q_in_registers, "flash_forward_shared")
    address, thread, block, uniform, udiv, sync = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync
    )  # fmt: skip

    @tiles.op("i32, i64, i64, i32, i32, i32")
    def copy_q(e, target, source, step, left, chunk, barrier):
        copy_tile(e, target, source, step, left, chunk, BM, D, 32, whole)
        e.barrier_arrive_copies(barrier)

    @tiles.op("i32, i64, i64, i32, i32, i32")
    def copy_kv(e, target, source, step, left, chunk, barrier):
        copy_tile(e, target, source, step, left, chunk, BN, D, 32, whole)
        e.barrier_arrive_copies(barrier)

    @tiles.op("i32")
    def init_barriers(e, sm):
        for i in range(2 * stages + 1):
            e.barrier_init(sm, BARRIERS + 8 * i, 32)
        for i in range(stages):
            e.barrier_init(sm, FREE + 8 * i, 4 * W)

    @tiles.op("i32, i32")
    def wait(e, barrier, parity):
        e.barrier_wait(barrier, parity)

    @tiles.op("i32, i32")
    def wait_tile(e, barrier, parity):
        e.barrier_wait(barrier, parity)
        e.fence_async()

    @tiles.op("i32")
    def free(e, barrier):
        e.barrier_arrive(barrier)

    @tiles.op("")
    def drain(e):
        e.wait_all_copies()

    @tiles.op("i32")
    def sync_warpgroup(e, barrier):
        e.sync_warpgroup(barrier)

    def flash_forward(qkv, out, lse, T, H, heads, group, sl):
        blocks = udiv(T + (BM - 1), BM)
        bh, j = place(block(), heads, blocks, group)
        b = udiv(bh, H)
        h = bh - b * H
        q0 = (blocks - 1 - j) * BM  # heaviest first
        t = thread()
        lane = t & 31
        warp = uniform(t >> 5)
        sm = shared()
        if warp == 0:
            init_barriers(sm)
        sync()
        slot = 0
        phase = 0
        if warp == 4 * W:
            chunk = lane & 7
            row = lane >> 3
            stride = H * (6 * D)
            step = stride * STRIDE
            source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
            k_source = source + H * (2 * D)
            v_source = k_source + H * (2 * D)
            target = sm + row * ROW_BYTES + ((chunk ^ row) << 4)
            copy_q(target, source + q0 * stride, step, T - q0 - row, chunk, sm + BARRIERS)
            last = min(q0 + BM, T)
            k0 = 0
            while k0 < last:
                wait(sm + FREE + 8 * slot, phase ^ 1)
                to = target + Q + slot * STAGE
                copy_kv(to, k_source + k0 * stride, step, T - k0 - row, chunk, sm + KEYS + 8 * slot)
                copy_kv(to + KV, v_source + k0 * stride, step, T - k0 - row, chunk, sm + VALUES + 8 * slot)
                k0 += BN
                slot += 1
                if slot == stages:
                    slot = 0
                    phase ^= 1
            drain()
        else:
            g0 = q0 + (warp >> 2) * 64
            w0 = q0 + warp * 16
            diff = (lane >> 2) - 2 * (lane & 3) + w0
            wait_tile(sm + BARRIERS, 0)
            q = query(sm + (warp >> 2) * (64 * ROW_BYTES))
            o, largest, total = begin()
            last = min(g0 + 64, T)
            k0 = 0
            if overlap:
                wait_tile(sm + KEYS, 0)
                s = scores(q, sm + Q)
                if BN - 1 > g0:
                    s = mask(s, diff)
                p, largest, total, o = softmax(s, largest, total, o, sl)
                before = 0
                before_phase = 0
                k0 = BN
                slot = 1
                while k0 < last:
                    wait_tile(sm + KEYS + 8 * slot, phase)
                    wait_tile(sm + VALUES + 8 * before, before_phase)
                    s, o, p = scores_and_weigh(q, sm + Q + slot * STAGE, o, p, sm + Q + KV + before * STAGE)
                    if k0 + (BN - 1) > g0:
                        s = mask(s, diff - k0)
                    p, largest, total, o = softmax_then_rescale(s, largest, total, sl, o, p)
                    free(sm + FREE + 8 * before)
                    before = slot
                    before_phase = phase
                    k0 += BN
                    slot += 1
                    if slot == stages:
                        slot = 0
                        phase ^= 1
                wait_tile(sm + VALUES + 8 * before, before_phase)
                o = weigh(o, p, sm + Q + KV + before * STAGE)
            else:
                while k0 < last:
                    wait_tile(sm + KEYS + 8 * slot, phase)
                    s = scores(q, sm + Q + slot * STAGE)
                    if k0 + (BN - 1) > g0:
                        s = mask(s, diff - k0)
                    p, largest, total, o = softmax(s, largest, total, o, sl)
                    wait_tile(sm + VALUES + 8 * slot, phase)
                    o = weigh(o, p, sm + Q + KV + slot * STAGE)
                    free(sm + FREE + 8 * slot)
                    k0 += BN
                    slot += 1
                    if slot == stages:
                        slot = 0
                        phase ^= 1
            sync_warpgroup(1 + (warp >> 2))
            orow = H * (2 * D)
            finish(
                o, largest, total, sl, address(lse) + (bh * T + w0 + (lane >> 2)) * 4, T - w0 - (lane >> 2),
                sm + warp * (16 * ROW_BYTES),
                address(out) + (b * T + w0 + (lane >> 3)) * orow + h * (2 * D) + (lane & 7) * 16,
                orow * 4, T - w0 - (lane >> 3),
            )  # fmt: skip

    return flash_forward, THREADS, BARRIERS + 8 + 24 * stages


def drifting_body(
    tiles,
    D: int,
    W: int = 2,
    BN: int = 64,
    stages: int = 4,
    whole: bool = False,
    q_in_registers: bool = False,
    overlap: bool = False,
):
    """`pipelined_body` in which every thread copies, stages - 2 tiles ahead."""
    assert stages >= 3 and (W - 1) * 64 <= stages * BN  # a warpgroup that needs no more tiles frees none
    BM, THREADS, STRIDE, AHEAD = 64 * W, 128 * W, 16 * W, stages - 2
    KV = tile_bytes(BN, D)
    Q, STAGE = tile_bytes(BM, D), 2 * KV
    BARRIERS = Q + stages * STAGE  # queries; then of each stage: keys, values, free
    KEYS, VALUES, FREE = BARRIERS + 8, BARRIERS + 8 + 8 * stages, BARRIERS + 8 + 16 * stages
    (
        shared,
        place,
        query,
        begin,
        scores,
        mask,
        softmax,
        weigh,
        finish,
        scores_and_weigh,
        softmax_then_rescale,
    ) = _routines(tiles, D, W, BN, whole, q_in_registers, "flash_forward_shared")
    address, thread, block, uniform, udiv, sync = (
        tiles.address, tiles.thread, tiles.block, tiles.uniform, tiles.udiv, tiles.sync
    )  # fmt: skip

    @tiles.op("i32, i64, i64, i32, i32, i32")
    def copy_q(e, target, source, step, left, chunk, barrier):
        copy_tile(e, target, source, step, left, chunk, BM, D, THREADS, whole)
        e.barrier_arrive_copies(barrier)

    @tiles.op("i32, i64, i64, i64, i32, i32, i32")
    def copy_kv(e, target, k, v, step, left, chunk, barrier):
        copy_tile(e, target, k, step, left, chunk, BN, D, THREADS, whole)
        e.barrier_arrive_copies(barrier)
        copy_tile(e, e.add(target, KV), v, step, left, chunk, BN, D, THREADS, whole)
        e.barrier_arrive_copies(e.add(barrier, VALUES - KEYS))

    @tiles.op("i32")
    def init_barriers(e, sm):
        for i in range(2 * stages + 1):
            e.barrier_init(sm, BARRIERS + 8 * i, THREADS)
        for i in range(stages):
            e.barrier_init(sm, FREE + 8 * i, 4 * W)

    @tiles.op("i32, i32")
    def wait(e, barrier, parity):
        e.barrier_wait(barrier, parity)

    @tiles.op("i32, i32")
    def wait_tile(e, barrier, parity):
        e.barrier_wait(barrier, parity)
        e.fence_async()

    @tiles.op("i32")
    def free(e, barrier):
        e.barrier_arrive(barrier)

    @tiles.op("i32")
    def sync_warpgroup(e, barrier):
        e.sync_warpgroup(barrier)

    def flash_forward(qkv, out, lse, T, H, heads, group, sl):
        blocks = udiv(T + (BM - 1), BM)
        bh, j = place(block(), heads, blocks, group)
        b = udiv(bh, H)
        h = bh - b * H
        q0 = (blocks - 1 - j) * BM  # heaviest first
        t = thread()
        lane = t & 31
        warp = uniform(t >> 5)
        sm = shared()
        if warp == 0:
            init_barriers(sm)
        sync()
        chunk = t & 7
        row = t >> 3
        stride = H * (6 * D)
        step = stride * STRIDE
        source = address(qkv) + (b * T + row) * stride + h * (2 * D) + chunk * 16
        k_source = source + H * (2 * D)
        target = sm + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)
        copy_q(target, source + q0 * stride, step, T - q0 - row, chunk, sm + BARRIERS)
        last = min(q0 + BM, T)
        load0 = 0
        load_slot = 0
        load_phase = 1
        while load0 < min(last, AHEAD * BN):
            k = k_source + load0 * stride
            copy_kv(
                target + Q + load_slot * STAGE,
                k,
                k + H * (2 * D),
                step,
                T - load0 - row,
                chunk,
                sm + KEYS + 8 * load_slot,
            )
            load0 += BN
            load_slot += 1

        g0 = q0 + (warp >> 2) * 64
        w0 = q0 + warp * 16
        diff = (lane >> 2) - 2 * (lane & 3) + w0
        wait_tile(sm + BARRIERS, 0)
        q = query(sm + (warp >> 2) * (64 * ROW_BYTES))
        o, largest, total = begin()
        k0 = 0
        slot = 0
        phase = 0
        before = 0
        before_phase = 0
        if overlap:
            wait_tile(sm + KEYS, 0)
            s = scores(q, sm + Q)
            if BN - 1 > g0:
                s = mask(s, diff)
            p, largest, total, o = softmax(s, largest, total, o, sl)
        while k0 < last:
            if load0 < last:
                wait(sm + FREE + 8 * load_slot, load_phase)
                k = k_source + load0 * stride
                copy_kv(
                    target + Q + load_slot * STAGE,
                    k,
                    k + H * (2 * D),
                    step,
                    T - load0 - row,
                    chunk,
                    sm + KEYS + 8 * load_slot,
                )
                load0 += BN
                load_slot += 1
                if load_slot == stages:
                    load_slot = 0
                    load_phase ^= 1
            if overlap:
                # tile k0 has its P; multiply it while the scores of the next come
                if k0 <= g0 + 63:
                    before = slot
                    before_phase = phase
                slot += 1
                if slot == stages:
                    slot = 0
                    phase ^= 1
                if k0 + BN <= g0 + 63 and k0 + BN < last:
                    wait_tile(sm + KEYS + 8 * slot, phase)
                    wait_tile(sm + VALUES + 8 * before, before_phase)
                    s, o, p = scores_and_weigh(q, sm + Q + slot * STAGE, o, p, sm + Q + KV + before * STAGE)
                    if k0 + (2 * BN - 1) > g0:
                        s = mask(s, diff - k0 - BN)
                    p, largest, total, o = softmax_then_rescale(s, largest, total, sl, o, p)
                    free(sm + FREE + 8 * before)
                elif k0 <= g0 + 63:
                    wait_tile(sm + VALUES + 8 * before, before_phase)
                    o = weigh(o, p, sm + Q + KV + before * STAGE)
                    free(sm + FREE + 8 * before)
            else:
                if k0 <= g0 + 63:
                    wait_tile(sm + KEYS + 8 * slot, phase)
                    s = scores(q, sm + Q + slot * STAGE)
                    if k0 + (BN - 1) > g0:
                        s = mask(s, diff - k0)
                    p, largest, total, o = softmax(s, largest, total, o, sl)
                    wait_tile(sm + VALUES + 8 * slot, phase)
                    o = weigh(o, p, sm + Q + KV + slot * STAGE)
                    free(sm + FREE + 8 * slot)
                slot += 1
                if slot == stages:
                    slot = 0
                    phase ^= 1
            k0 += BN
        sync_warpgroup(1 + (warp >> 2))
        orow = H * (2 * D)
        finish(
            o, largest, total, sl, address(lse) + (bh * T + w0 + (lane >> 2)) * 4, T - w0 - (lane >> 2),
            sm + warp * (16 * ROW_BYTES),
            address(out) + (b * T + w0 + (lane >> 3)) * orow + h * (2 * D) + (lane & 7) * 16,
            orow * 4, T - w0 - (lane >> 3),
        )  # fmt: skip

    return flash_forward, THREADS, BARRIERS + 8 + 24 * stages
