"""The next token of each sequence, drawn from its logits.

    w_i = exp((x_i - max x) / temperature) for kept i, else 0
    token = the first i with w_0 + … + w_i > u * sum w                       u uniform in [0, 1)

Kept are the `top_k` largest logits (Fan et al., 2018), and of these the fewest, largest first, that together
have the share `top_p` of the weight (Holtzman et al., 2020). Of equal logits those with the lower index come
first, so exactly top_k tokens are kept. Temperature 0 takes the first of the largest logits.

logits: (N, L), one of fp32, fp16, bf16; columns from vocab_size on are padding and not read. tokens: (N,)
int32. u = the upper 24 bits of Philox(rng, site, row) / 2**24 (see `nbtrain.device.philox`): a row draws the
same number whatever stands in the others. Arithmetic and sums are fp32 on the GPU, where nothing is sorted:
the k-th largest logit is found by bisection between logits that are there, one pass over the row a step, and
top_p's likewise.

A row with a logit that is not finite has no next token. Its result is negative and says where and what; see
`bad_logit`. The host need not look before the next launch.
"""

import functools

import numpy as np

from nbtrain.config import is_number, is_whole
from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    block_max,
    block_sum,
    cuda,
    device_function,
    exp2,
    expect,
    float32,
    int32,
    kernel,
    launch,
    load,
    on_gpu,
    prange,
    random_bits,
    row_access,
    tuned,
    twin,
    uint32,
)
from nbtrain.device.cpu import exp, routine
from nbtrain.device.philox import random_bits_cpu
from nbtrain.errors import InvalidValue

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
LOG2E, STEP = np.float32(1 / np.log(2)), np.float32(2.0**-24)
HIGHEST = np.finfo(np.float32).max
LOWEST = -HIGHEST
MAX_VOCAB = 1 << 24  # indices that fp32 reductions hold exactly
NAN, PLUS, MINUS = 0, 1, 2  # what a bad logit is
LIMITS = np.float32(1e-19), np.float32(1e18)  # of 1 / temperature: beyond, the draw is uniform or greedy
FAR = np.float32(-1e19)  # from the largest logit, where a weight is 0; times a scale it is finite

# ----------------------------------------------------------------------------
# GPU kernel


@functools.cache
def _kernel(aligned: bool, greedy: bool, with_top_k: bool, with_top_p: bool):
    """One block a row, read again from the cache for every pass. Kept are logits above `cut`, and those equal
    to it before the index `bound`. Without fastmath, which may assume that there is no nan."""
    T, _ = tuned("sample")
    TILE = 8 * T
    load8, _ = row_access(aligned)
    whole_sum, whole_max = block_sum(T), block_max(T)

    @device_function
    def power(x, top, scale):
        """exp((x - top) / temperature), scale = 2 log2(e) / temperature; halves, for x - top may overflow."""
        return exp2(max(HALF * x - HALF * top, FAR) * scale)

    @device_function
    def split(logits, base, V, mid, cut, bound, top, scale, mass):
        """Of a thread's kept logits: (the weight of those from `mid` on, the least of them, the largest
        below). Without `mass` each weighs 1."""
        a = cuda.local.array(8, float32)
        s, up, down = ZERO, HIGHEST, LOWEST
        i = cuda.threadIdx.x * 8
        while i < V:
            load8(a, 0, logits, base + i, V - i)
            for j in range(8):
                if i + j < V and (a[j] > cut or (a[j] == cut and i + j < bound)):
                    if a[j] >= mid:
                        s += power(a[j], top, scale) if mass else ONE
                        up = min(up, a[j])
                    else:
                        down = max(down, a[j])
            i += TILE
        return s, up, down

    @device_function
    def tally(logits, base, V, cut, bound, at, top, scale, mass):
        """Of a thread's kept logits: (the weight of those above `at`, the number of those equal to it)."""
        a = cuda.local.array(8, float32)
        s, equal = ZERO, ZERO
        i = cuda.threadIdx.x * 8
        while i < V:
            load8(a, 0, logits, base + i, V - i)
            for j in range(8):
                if i + j < V and (a[j] > cut or (a[j] == cut and i + j < bound)):
                    if a[j] > at:
                        s += power(a[j], top, scale) if mass else ONE
                    elif a[j] == at:
                        equal += ONE
            i += TILE
        return s, equal

    @device_function
    def weigh(a, logits, base, i, V, cut, bound, top, scale, ties):
        """a = the weights of eight logits, and their sum; with `ties` 1 for each kept one that equals cut."""
        s = ZERO
        if i < V:
            load8(a, 0, logits, base + i, V - i)
        for j in range(8):
            w = ZERO
            if i + j < V:
                if a[j] == cut and i + j < bound:
                    w = ONE if ties else power(a[j], top, scale)
                elif a[j] > cut and not ties:
                    w = power(a[j], top, scale)
            a[j] = w
            s += w
        return s

    @kernel(launch_bounds=(T, 1), fastmath=False)
    def sample(logits, rng, site, L, V, scale, top_k, top_p, tokens):
        sums = cuda.shared.array(T, float32)
        a = cuda.local.array(8, float32)
        n = cuda.blockIdx.x
        lane = cuda.threadIdx.x
        base = n * L
        top, low, bad = LOWEST, HIGHEST, LOWEST
        i = lane * 8
        while i < V:
            load8(a, 0, logits, base + i, V - i)
            for j in range(8):
                if i + j < V:
                    if abs(a[j]) <= HIGHEST:
                        top = max(top, a[j])
                        low = min(low, a[j])
                    else:
                        bad = max(bad, -float32(i + j))
            i += TILE
        top = whole_max(top)
        low = -whole_max(-low)
        bad = whole_max(bad)
        if bad > LOWEST:
            if lane == 0:
                at = int32(-bad)
                x = load(logits, base + at)
                kind = PLUS if x > ZERO else (MINUS if x < ZERO else NAN)
                tokens[n] = -1 - 3 * at - kind
            return
        cut, bound, total = LOWEST, V, ZERO
        if greedy:
            cut = top
        for stage in range(3):  # top_k, top_p, the draw
            if (stage == 0 and with_top_k) or (stage == 1 and with_top_p) or stage == 2:
                # The largest logit such that those from it on weigh `need`, between two that are there. The
                # first pass of a stage that weighs by mass finds the mass of all that is kept.
                need, high = top_k, top
                unknown = stage > 0 and not greedy and total == ZERO
                if stage == 1 and not unknown:
                    need = top_p * total
                while unknown or (stage < 2 and low < high):
                    mid = HALF * low + HALF * high
                    if not (mid > low and mid <= high):
                        mid = high
                    if unknown:
                        mid = LOWEST
                    s, up, down = split(logits, base, V, mid, cut, bound, top, scale, stage > 0)
                    s = whole_sum(s)
                    up = -whole_max(-up)
                    down = whole_max(down)
                    if unknown:
                        total = s
                        need = top_p * total
                        unknown = False
                    elif s >= need:
                        low = up
                        if s == need:
                            high = up
                    else:
                        high = down
                target, ties, walks = ZERO, greedy, True
                if stage == 2:
                    if not greedy:
                        target = float32(random_bits(rng, site, n) >> uint32(8)) * STEP * total
                else:
                    s, equal = tally(logits, base, V, cut, bound, low, top, scale, stage == 1)
                    s = whole_sum(s)
                    equal = whole_sum(equal)
                    w = power(low, top, scale) if stage == 1 else ONE
                    count = float32(int32(min(max((need - s) / w, ONE), equal)))
                    while count < equal and s + count * w < need:
                        count += ONE
                    if low > cut:
                        bound = V
                    cut = low
                    if stage == 1:
                        total = s + count * w
                    target, ties, walks = count - HALF, True, count < equal
                # The element at which the sum of weights passes target; the last that has a weight where
                # rounding leaves none.
                first, before = 0, ZERO
                chosen, last = -ONE, -ONE
                while walks:
                    i = first + lane * 8
                    s = weigh(a, logits, base, i, V, cut, bound, top, scale, ties)
                    for j in range(8):
                        if a[j] > ZERO:
                            last = float32(i + j)
                    sums[lane] = s
                    cuda.syncthreads()
                    distance = 1
                    while distance < T:
                        left = ZERO
                        if lane >= distance:
                            left = sums[lane - distance]
                        cuda.syncthreads()
                        sums[lane] += left
                        cuda.syncthreads()
                        distance *= 2
                    # Sums of different threads are rounded apart, so that several may be the first: one is.
                    rest = target - before
                    owner = -whole_max(-float32(lane) if s > ZERO and sums[lane] > rest else LOWEST)
                    if float32(lane) == owner:
                        left = sums[lane] - s
                        for j in range(8):
                            if a[j] > ZERO and (chosen < ZERO or left <= rest):
                                chosen = float32(i + j)
                                left += a[j]
                    before += sums[T - 1]
                    first += TILE
                    walks = owner == HIGHEST and first < V
                chosen = whole_max(chosen)
                last = whole_max(last)
                if chosen < ZERO:
                    chosen = last
                if stage < 2:
                    if count < equal:
                        bound = int32(chosen) + int32(1)
                elif lane == 0:
                    tokens[n] = int32(chosen)

    return sample, T


# ----------------------------------------------------------------------------
# CPU twin


@routine
def _cut(row, top, inv_temperature, top_k, top_p):
    """(cut, bound) as in the kernel, by sorting the top_k largest logits."""
    V = row.size
    least = row.min() if top_k >= V else np.partition(row, V - top_k)[V - top_k]
    candidates = np.flatnonzero(row >= least)
    order = candidates[np.argsort(-row[candidates], kind="mergesort")][:top_k]
    last = order[-1]
    if top_p < ONE:
        total = 0.0
        for i in order:
            total += exp((row[i] - top) * inv_temperature)
        share = 0.0
        for i in order:
            share += exp((row[i] - top) * inv_temperature)
            if share >= top_p * total:
                last = i
                break
    return row[last], last + 1


@twin(writes="tokens")
def _cpu(logits, rng, site, V, inv_temperature, greedy, top_k, top_p, tokens):
    """top_k = V and top_p = 1 keep everything."""
    for n in prange(tokens.size):
        row = logits[n, :V]
        top, first, bad = row[0], 0, -1
        for i in range(V):
            if not abs(row[i]) <= HIGHEST:
                bad = i
                break
            if row[i] > top:
                top, first = row[i], i
        if bad >= 0:
            kind = PLUS if row[bad] > ZERO else (MINUS if row[bad] < ZERO else NAN)
            tokens[n] = -1 - 3 * bad - kind
            continue
        if greedy:
            tokens[n] = first
            continue
        cut, bound = row[0], V
        everything = top_k >= V and top_p >= ONE
        if not everything:
            cut, bound = _cut(row, top, inv_temperature, top_k, top_p)
        total = 0.0
        for i in range(V):
            if everything or row[i] > cut or (row[i] == cut and i < bound):
                total += exp((row[i] - top) * inv_temperature)
        u = np.float32(random_bits_cpu(rng, site, n) >> np.uint32(8)) * STEP
        share, chosen = 0.0, first
        for i in range(V):
            if everything or row[i] > cut or (row[i] == cut and i < bound):
                w = exp((row[i] - top) * inv_temperature)
                if w > ZERO:
                    chosen = i
                share += w
                if share > u * total:
                    break
        tokens[n] = chosen


# ----------------------------------------------------------------------------
# Launcher


def sample(
    logits, rng=None, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    vocab_size: int | None = None, site: int = 0, out=None,
):  # fmt: skip
    """Returns tokens (N,) int32. `rng` (3,) uint32 is needed above temperature 0; `site` tells the draws of
    one row apart."""
    logits, rng, tokens = as_arrays(logits, rng, out)
    N, L, *_ = expect("sample", "logits (N, L), rng (3,) uint32, out (N,) int32", logits, rng, tokens)
    V = L if vocab_size is None else vocab_size
    if not 1 <= V <= min(L, MAX_VOCAB):
        raise InvalidValue(
            f"sample expects vocab_size in 1 … {min(L, MAX_VOCAB)}, of the {L} columns of logits; got {V}."
        )
    temperature, top_k, top_p = checked_options(temperature, top_k, top_p)
    if rng is None and temperature > 0:
        raise InvalidValue("sample draws by rng (3,) uint32 above temperature 0; got None.")
    tokens = array_module(logits).empty(N, np.int32) if tokens is None else tokens
    greedy = temperature == 0
    k = V if greedy or top_k is None else min(top_k, V)
    p = ONE if greedy or top_p is None else np.float32(top_p)
    with np.errstate(over="ignore", under="ignore"):
        inv = np.clip(np.float32(1 / temperature if temperature else 1), *LIMITS)
    rng = array_module(logits).zeros(3, np.uint32) if rng is None else rng
    if on_gpu(logits):
        choose, T = _kernel(aligned(L, logits), greedy, k < V, p < 1)
        options = np.float32(2 * inv * LOG2E), np.float32(k), p
        launch(choose, N, T, logits, rng, site, L, np.int32(V), *options, tokens)
    else:
        _cpu(logits, rng, site, V, inv, greedy, k, p, tokens)
    return tokens


def checked_options(
    temperature: float, top_k: int | None, top_p: float | None
) -> tuple[float, int | None, float | None]:
    """The options of `sample`, as Python's numbers; raises InvalidValue for what it cannot take."""
    if not is_number(temperature) or not 0 <= temperature < np.inf:
        raise InvalidValue(f"temperature must be a number, 0 or more; got {temperature!r}.")
    if top_k is not None and (not is_whole(top_k) or top_k < 1):
        raise InvalidValue(f"top_k must be an int, 1 or more, or None; got {top_k!r}.")
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise InvalidValue(f"top_p must be a number in (0, 1], or None; got {top_p!r}.")
    if not isinstance(temperature, int):  # which may be beyond float
        temperature = float(temperature)
    return temperature, None if top_k is None else int(top_k), None if top_p is None else float(top_p)


def bad_logit(token: int) -> tuple[int, float] | None:
    """(index, value) of the first logit that is not finite, from a result of `sample` that says so."""
    if token >= 0:
        return None
    at, kind = divmod(-1 - int(token), 3)
    return at, (float("nan"), float("inf"), float("-inf"))[kind]
