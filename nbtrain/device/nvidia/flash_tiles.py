"""Tile routines that flash attention's kernels share: products, copies, masks, the order of blocks.

Shared tiles of R rows of D columns are panels of 64 columns, R rows of 128 bytes each (see
`nbtrain.device.nvidia.ptx`). A warp holds 16 rows of an accumulator: lane l has rows l // 4 and l // 4 +
8, and of every eight columns 2 (l % 4) and the next. In a flat list that is index column // 8 * 4 + 2 *
(row >= 8) + column % 2; m16n8 and wgmma accumulators agree in this, and packed in pairs they are the A
operand of the next product.

`left` is how many rows of a tile there are still, counted from the row of the thread that asks; a tile is
`whole` where T is a multiple of its rows. Rows beyond T are read as zeros and never written. No mask is
needed for them: causal attention hides keys beyond T from every query before T.
"""

from nbtrain.device.nvidia.ptx import ROW_BYTES, Product

PANEL = 64  # columns
NEGATIVE_INFINITY = float("-inf")


def tile_bytes(rows: int, D: int) -> int:
    return -(-D // PANEL) * rows * ROW_BYTES


def panels(D: int):
    """(panel, its columns) of D columns."""
    return [(p, min(PANEL, D - p * PANEL)) for p in range(-(-D // PANEL))]


# ----------------------------------------------------------------------------
# Products


def matrix_lane(e):
    """Offset of the row that a lane addresses in ldmatrix, for A tiles and B tiles stored by rows of k."""
    lane = e.and_(e.thread(), 31)
    chunk = e.xor(e.shr(lane, 4), e.and_(lane, 7))
    return e.add(e.mul(e.and_(lane, 15), ROW_BYTES), e.shl(chunk, 4))


def _matrix_lane_n(e):
    """The same for B tiles stored by rows of n."""
    lane = e.and_(e.thread(), 31)
    row = e.add(e.and_(lane, 7), e.shl(e.shr(lane, 4), 3))
    chunk = e.xor(e.and_(e.shr(lane, 3), 1), e.and_(lane, 7))
    return e.add(e.mul(row, ROW_BYTES), e.shl(chunk, 4))


def load_a(e, address, k: int, panel: int):
    """A registers of this warp's 16 of the 64 rows at `address`, 16 k columns."""
    warp = e.and_(e.shr(e.thread(), 5), 3)
    base = e.add(e.add(address, e.mul(warp, 16 * ROW_BYTES)), matrix_lane(e))
    registers = []
    for step in range(k):
        registers += e.load_matrices(e.xor(base, step % 4 * 32), step // 4 * panel, False)
    return registers


def products(e, *jobs: Product):
    """The accumulators of each product, by wgmma or by mma.sync."""
    if e.arch >= 90:
        return e.wgmma(jobs)
    return [_product_by_warp(e, job) for job in jobs]


def _product_by_warp(e, job: Product):
    acc = [e.f(0.0)] * (job.n // 2) if job.acc is None else list(job.acc)
    a = job.a if isinstance(job.a, list) else load_a(e, job.a, job.k, job.a_panel)
    base = e.add(job.b, matrix_lane(e) if job.by_rows_of_k else _matrix_lane_n(e))
    for k in range(job.k):
        for pair in range(job.n // 16):
            if job.by_rows_of_k:
                at, offset = pair % 4 * 32, pair // 4 * job.b_panel + k * 16 * ROW_BYTES
            else:
                at, offset = k % 4 * 32, k // 4 * job.b_panel + pair * 16 * ROW_BYTES
            b = e.load_matrices(e.xor(base, at), offset, job.by_rows_of_k)
            for j in range(2):
                x = (2 * pair + j) * 4
                acc[x : x + 4] = e.mma(acc[x : x + 4], a[4 * k : 4 * k + 4], b[2 * j : 2 * j + 2])
    return acc


def as_operand(e, acc):
    """16 rows of an accumulator as A registers of the next product, rounded to storage."""
    return [e.pack(acc[x], acc[x + 1]) for x in range(0, len(acc), 2)]


# ----------------------------------------------------------------------------
# Copies


def copy_tile(e, target, source, step, left, chunk, rows: int, D: int, threads: int, whole: bool):
    """Asynchronous copy of a tile; eight threads a row, each thread every threads / 8 rows.

    target and source: the thread's first chunk; step: bytes between its rows in global memory; chunk: its
    chunk of a row, 0..7.
    """
    stride = threads // 8
    for i in range(-(-rows // stride)):
        # rows four apart swap the halves of a row in the swizzle
        at = e.xor(target, 64) if i * stride % 8 else target
        for panel, columns in panels(D):
            e.copy16(
                at,
                panel * rows * ROW_BYTES + i * stride * ROW_BYTES,
                source,
                panel * ROW_BYTES,
                if_gt=None if columns == PANEL else (e.sub(e.i(columns // 8), chunk), 0),
                zero_unless_gt=None if whole else (left, i * stride),
            )
        source = e.add64(source, step)


def store_tile(e, acc, scale, shared, panel_bytes: int, target, step, left, D: int, whole: bool):
    """This warp's 16 rows to global memory in storage precision, through its own rows of a tile at `shared`.

    scale: a factor for rows 0..7 and one for 8..15; target: the address of the row lane // 8, chunk lane
    % 8, in global memory; step: the bytes of four rows; left: counted from row lane // 8.
    """
    lane = e.and_(e.thread(), 31)
    row = e.shr(lane, 2)
    write = e.add(shared, e.add(e.mul(row, ROW_BYTES + 16), e.shl(e.and_(lane, 3), 2)))
    for n in range(D // 8):
        for half in range(2):
            x = n * 4 + 2 * half
            word = e.pack(e.fmul(acc[x], scale[half]), e.fmul(acc[x + 1], scale[half]))
            offset = n // 8 * panel_bytes + half * 8 * ROW_BYTES
            e.store_shared(e.xor(write, n % 8 * 16), offset, word)
    e.sync_warp()
    row, chunk = e.shr(lane, 3), e.and_(lane, 7)
    read = e.add(shared, e.add(e.mul(row, ROW_BYTES), e.shl(e.xor(chunk, row), 4)))
    for i in range(4):
        for panel, columns in panels(D):
            words = e.load_shared4(e.xor(read, 64 * (i & 1)), panel * panel_bytes + i * 4 * ROW_BYTES)
            rows = e.i(16) if whole else left
            if columns < PANEL:
                rows = e.select_ge(e.sub(e.i(columns // 8 - 1), chunk), 0, rows, e.i(0))
            guard = None if whole and columns == PANEL else (rows, i * 4)
            e.store_global4(target, panel * ROW_BYTES, words, guard)
        target = e.add64(target, step)


def sum_columns(e, acc, scale, target, left, D: int):
    """The sum of this warp's 16 rows, times `scale`, to fp32 in global memory, if `left` > 0.

    target: the address of the lane's first column, 2 (lane % 4).
    """
    lane = e.and_(e.thread(), 31)
    some_lanes = e.select_ge(left, 1, e.sub(e.i(4), lane), e.i(0))
    for n in range(D // 8):
        for j in range(2):
            total = e.fmul(e.fadd(acc[4 * n + j], acc[4 * n + 2 + j]), scale)
            for distance in (4, 8, 16):
                total = e.fadd(total, e.shuffle_xor(total, distance))
            e.store_global_f(target, n * 32 + j * 4, total, (some_lanes, 0))


# ----------------------------------------------------------------------------
# Masks and order


def keep_visible(e, values, x, hidden: float, by_queries: bool):
    """`values` where the query is not before the key, else `hidden`.

    by_queries: rows are queries and x is the lane's first row - its first column; else rows are keys, and
    x is its first column - its first row.
    """
    other, kept = e.f(hidden), []
    for i, value in enumerate(values):
        row, column = i // 2 % 2 * 8, i // 4 * 8 + i % 2
        kept.append(e.select_ge(x, column - row if by_queries else row - column, value, other))
    return kept


def pick(e, index, heads, blocks, group):
    """(head, block) of the index-th block to start: block 0 of `group` heads, then their block 1 …, then the
    next group.

    A group's keys and values stay in the L2 cache while its blocks read them again and again.
    """
    first = e.mul(e.udiv(index, e.mul(group, blocks)), group)
    size = e.min(group, e.sub(heads, first))
    rest = e.sub(index, e.mul(first, blocks))
    block = e.udiv(rest, size)
    return e.add(first, e.sub(rest, e.mul(block, size))), block
