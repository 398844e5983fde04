import contextlib
import dataclasses
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device.outline import Outline
from nbtrain.device.place import to_device, to_host
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.modes import donate
from nbtrain.train import init, init_opt_state, make_eval_step, make_train_step
from nbtrain.tree import Layout, Tree
from tests.golden import load_golden
from tests.reference import f64
from tests.test_model import DEVICES, golden_tree

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11)
DTYPES = ["fp32", "fp16", "bf16"]


def batch_of(cfg, A=1, B=2, T=8, seed=0, device="cpu"):
    tokens, targets = np.random.default_rng(seed).integers(0, cfg.vocab_size, (2, A, B, T))
    return Batch.of(to_device(tokens, device), to_device(targets, device))


def state_arrays(params, state):
    trees = [to_host(t.buffer) for t in (params, state.master, state.m, state.v)]
    scalars = (state.step, state.updates, *state.loss_scale, state.seed)
    return trees + [to_host(x) for x in scalars]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(state_arrays(*a), state_arrays(*b), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_ten_steps_match_pytorch(device):
    golden = load_golden()
    cfg = GPTConfig(**golden.config)
    s, o = golden.schedule, golden.optimizer
    step = donate(
        make_train_step(
            cfg,
            TrainConfig(
                lr=s["lr"], schedule="cosine", warmup=s["warmup"], total=s["total"], min_lr=s["min_lr"],
                betas=tuple(o["betas"]), eps=o["eps"], weight_decay=o["weight_decay"], clip=o["clip"],
            ),
        )
    )  # fmt: skip
    params = golden_tree(golden, device)
    state = init_opt_state(params)
    for i, (tokens, targets) in enumerate(golden.batches):
        batch = Batch.of(to_device(tokens, device), to_device(targets, device))
        params, state, metrics = step(params, state, batch)
        assert float(metrics.loss) == pytest.approx(float(golden.losses[i]), rel=1e-5), i
        assert float(metrics.grad_norm) == pytest.approx(float(golden.norms[i]), rel=1e-4), i
        assert float(metrics.lr) == pytest.approx(float(golden.lrs[i]), rel=1e-6), i
    from nbtrain.model import GPT

    tokens = Batch.of(*(to_device(x, device) for x in golden.batches[0])).tokens[0]
    logits = f64(to_host(GPT(cfg).logits(params, tokens)))
    assert (
        np.abs(logits - golden.final_logits.reshape(logits.shape)).max()
        <= 2e-4 * np.abs(golden.final_logits).max()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pure_step_leaves_its_inputs_alone_and_donation_gives_its_bits(device, dtype):
    cfg = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, dropout=0.1)
    pure = make_train_step(cfg, TrainConfig(lr=1e-2))
    fast = donate(make_train_step(cfg, TrainConfig(lr=1e-2)))
    a, b = init(cfg, 1, dtype, device), init(cfg, 1, dtype, device)
    for i in range(4):
        batch, before = batch_of(cfg, seed=i, device=device), state_arrays(*a)
        *new, metrics = pure(*a, batch)
        assert all(np.array_equal(x, y) for x, y in zip(before, state_arrays(*a), strict=True))
        *b, other = fast(*b, batch)
        assert same(new, b) and metrics.read() == other.read()
        a = new


@pytest.mark.parametrize("dtype", DTYPES)
def test_params_are_the_cast_of_the_master_weights_after_every_step(dtype):
    params, state = init(TINY, 0, dtype, "cpu")
    step = donate(make_train_step(TINY, TrainConfig(lr=1e-2)))
    for i in range(3):
        params, state, _ = step(params, state, batch_of(TINY, seed=i))
        assert np.array_equal(params.buffer, state.master.buffer.astype(params.dtype))
        assert (params is state.master) == (dtype == "fp32")


def test_a_consumed_tree_says_so():
    params, state = init(TINY, 0, "bf16", "cpu")
    step, batch = donate(make_train_step(TINY)), batch_of(TINY)
    step(params, state, batch)
    with pytest.raises(InvalidValue, match="donated to an earlier step"):
        step(params, state, batch)
    with pytest.raises(InvalidValue, match="donated to an earlier step"):
        params.wte  # noqa: B018


def test_a_wrong_batch_consumes_nothing():
    params, state = init(TINY, 0, "fp32", "cpu")
    step, bad = donate(make_train_step(TINY)), batch_of(TINY)
    bad.tokens[0, 1, 2] = 11
    with pytest.raises(InvalidValue, match=r"tokens\[0, 1, 2\] = 11"):
        step(params, state, bad)
    step(params, state, batch_of(TINY))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_batches_add_up_to_the_whole_batch(dtype):
    """Targets that do not count are spread unevenly: the mean is over the counted ones of all
    micro-batches."""
    whole = batch_of(TINY, A=1, B=4)
    whole.targets[0, :2, 3:] = -100
    split = Batch.of(whole.tokens.reshape(2, 2, 8), whole.targets.reshape(2, 2, 8))
    results = []
    for batch in (whole, split):
        params, state = init(TINY, 0, dtype, "cpu")
        results.append(make_train_step(TINY, TrainConfig(lr=1e-3))(params, state, batch))
    (_, one, m1), (_, two, m2) = results
    assert int(m1.n_targets) == int(m2.n_targets) == 22
    limit = 1e-5 if dtype == "fp32" else 2e-2
    assert float(m1.loss) == pytest.approx(float(m2.loss), rel=1e-5)
    assert float(m1.grad_norm) == pytest.approx(float(m2.grad_norm), rel=limit)
    assert np.abs(f64(one.m.buffer) - f64(two.m.buffer)).max() <= limit * np.abs(f64(one.m.buffer)).max()


def quadratic(params, batch, *, loss_scale, rng, out):
    """A loss of the user's own: sum of w**2 times the number of tokens."""
    n = batch.tokens.size
    with np.errstate(over="ignore"):  # fp16 gradients may overflow; the step has to notice
        out.w[...] = (2 * n * loss_scale[0] * params.w.astype(np.float32)).astype(out.dtype)
    return np.array([n * np.sum(params.w.astype(np.float32) ** 2)], np.float32)


def quadratic_tree(values, dtype):
    layout = Layout.of([("w", np.shape(values))])
    tree = Tree(layout, np.zeros(layout.size, dtype))
    tree.w[...] = values
    return tree


def test_a_loss_of_ones_own_trains():
    params = quadratic_tree([[1.0, -2.0]], np.float32)
    state = init_opt_state(params)
    step = make_train_step(quadratic, TrainConfig(lr=0.1, weight_decay=0, clip=0))
    losses = []
    for _ in range(60):
        params, state, metrics = step(params, state, batch_of(TINY))
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(5.0) and losses[-1] < 0.05


def test_a_non_finite_gradient_skips_the_update_and_halves_the_scale():
    params = quadratic_tree([[1.0, np.inf]], np.float16)
    state = init_opt_state(params)
    before = state_arrays(params, state)
    new, after, metrics = make_train_step(quadratic, TrainConfig())(params, state, batch_of(TINY))
    assert bool(metrics.skipped) and float(after.loss_scale.value[0]) == 2.0**15
    assert int(after.step[0]) == 1 and int(after.updates[0]) == 0
    assert all(np.array_equal(x, y) for x, y in zip(before[:4], state_arrays(new, after)[:4], strict=True))


def test_a_step_above_the_limits_of_its_state_is_skipped():
    step, batch = make_train_step(TINY, TrainConfig(lr=1e-2)), batch_of(TINY)
    params, state = init(TINY, 0, "fp16", "cpu")
    _, _, seen = step(params, state, batch)
    for limits, skipped in (
        ([np.inf, np.inf], False),
        ([float(seen.loss), float(seen.grad_norm)], False),
        ([float(seen.loss) * 0.99, np.inf], True),
        ([np.inf, float(seen.grad_norm) * 0.99], True),
    ):
        new, after, metrics = step(params, state._replace(limits=np.array(limits, np.float32)), batch)
        assert bool(metrics.skipped) is np.array_equal(new.buffer, params.buffer) is skipped
        assert (int(after.step[0]), int(after.updates[0])) == (1, 0 if skipped else 1)
        assert (
            float(after.loss_scale.value[0]) == 2.0**16
            and after.limits.tolist() == np.float32(limits).tolist()
        )


def test_the_loss_scale_does_not_change_the_update():
    results = []
    for scale in (2.0**4, 2.0**12):
        params = quadratic_tree([[0.5, -0.25]], np.float16)
        step = make_train_step(quadratic, TrainConfig(loss_scale=scale))
        results.append(step(params, init_opt_state(params), batch_of(TINY)))
    (p1, s1, m1), (p2, s2, m2) = results
    assert np.array_equal(s1.master.buffer, s2.master.buffer) and np.array_equal(p1.buffer, p2.buffer)
    assert float(m1.grad_norm) == float(m2.grad_norm)
    assert (float(m1.loss_scale), float(m2.loss_scale)) == (2.0**4, 2.0**12)


def test_unscaling_comes_before_clipping():
    params = quadratic_tree([[0.25, 0.0]], np.float32)  # the gradient's norm is 0.5
    step = make_train_step(quadratic, TrainConfig(clip=1.0, loss_scale=65536.0, betas=(0.0, 0.5)))
    _, state, metrics = step(params, init_opt_state(params), batch_of(TINY))
    assert float(metrics.grad_norm) == pytest.approx(0.5)
    assert float(state.m.w[0, 0]) == pytest.approx(0.5)


def test_a_batch_without_targets_changes_nothing_and_is_no_nan():
    params, state = init(TINY, 0, "fp16", "cpu")
    batch = batch_of(TINY)
    batch.targets[...] = -100
    new, after, metrics = make_train_step(TINY)(params, state, batch)
    assert bool(metrics.skipped) and float(metrics.loss) == 0 and int(metrics.n_targets) == 0
    assert np.array_equal(new.buffer, params.buffer)
    assert float(after.loss_scale.value[0]) == float(state.loss_scale.value[0])


@pytest.mark.gpu
def test_a_bad_id_on_the_device_raises_when_metrics_are_read_and_the_device_lives_on():
    params, state = init(TINY, 0, "fp32", "cuda:0")
    step = make_train_step(TINY)
    bad = batch_of(TINY, device="cuda:0")
    bad.tokens[0, 1, 2] = 65_000
    new, _, metrics = step(params, state, bad)
    with pytest.raises(InvalidValue, match=r"tokens\[0, 1, 2\] is 65000"):
        float(metrics.loss)
    assert np.array_equal(to_host(new.buffer), to_host(params.buffer))
    *_, metrics = step(params, state, batch_of(TINY, device="cuda:0"))
    assert np.isfinite(float(metrics.loss))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tiny_model_learns_a_pattern(dtype):
    tokens = (np.arange(9)[None] + np.arange(4)[:, None]) % 11
    batch = Batch.of(tokens[:, :-1], tokens[:, 1:])
    params, state = init(TINY, 0, dtype, "cpu")
    step = donate(make_train_step(TINY, TrainConfig(lr=1e-2)))
    for _ in range(80):
        params, state, metrics = step(params, state, batch)
    assert float(metrics.loss) < 0.1


def test_the_evaluation_step_gives_the_training_loss():
    params, state = init(TINY, 0, "fp32", "cpu")
    batch = batch_of(TINY, A=2)
    batch.targets[0, 0, :3] = -100
    *_, metrics = make_train_step(TINY)(params, state, batch)
    loss_sum, n = make_eval_step(TINY)(params, batch)
    assert float(loss_sum[0] / np.float32(n[0])) == float(metrics.loss)
    assert int(n[0]) == int(metrics.n_targets) == 29


def test_the_evaluation_step_checks_as_the_training_step_does():
    params, state = init(TINY, 0, "fp32", "cpu")
    batch, step = batch_of(TINY), make_eval_step(TINY)
    for wrong in (tuple(batch), batch.tokens, None):
        with pytest.raises(InvalidType, match=r"eval_step expects a Batch; got .* Batch\.of"):
            step(params, wrong)
    for wrong in (params.buffer, (params, state), None):
        with pytest.raises(InvalidType, match=r"eval_step expects \(params: Tree, batch\)"):
            step(wrong, batch)
    with pytest.raises(InvalidType, match="order is list"):
        step(params, batch._replace(order=batch.order.tolist()))
    with pytest.raises(InvalidType, match="expects a GPTConfig; got NoneType"):
        make_eval_step(None)
    batch.targets[0, 1, 2] = 11
    with pytest.raises(InvalidValue, match=r"targets\[0, 1, 2\] = 11"):
        step(params, batch)


@pytest.mark.parametrize("counts", [(5, 3, -1), (5, -1, 0)])
def test_a_bad_id_that_the_device_found_makes_the_evaluated_loss_nan(monkeypatch, counts):
    from nbtrain import train

    found = np.array(counts, np.int32)
    monkeypatch.setattr(train, "batch_check", lambda *args, **options: (found, None))
    params, _ = init(TINY, 0, "fp32", "cpu")
    loss_sum, n = make_eval_step(TINY)(params, batch_of(TINY))
    assert loss_sum.shape == (1,) and np.isnan(loss_sum[0]) and n.tolist() == [5]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_bad_id_on_the_device_makes_the_evaluated_loss_nan(name):
    params, _ = init(TINY, 0, "fp32", "cuda:0")
    step, bad = make_eval_step(TINY), batch_of(TINY, device="cuda:0")
    getattr(bad, name)[0, 1, 2] = 65_000
    assert np.isnan(float(step(params, bad)[0][0]))
    assert np.isfinite(float(step(params, batch_of(TINY, device="cuda:0"))[0][0]))


def test_wrong_arguments_say_what_was_expected():
    params, state = init(TINY, 0, "fp32", "cpu")
    with pytest.raises(InvalidType, match="train_step expects a Batch"):
        make_train_step(TINY)(params, state, batch_of(TINY).tokens)
    for use in (make_train_step(TINY), donate(make_train_step(TINY))):
        with pytest.raises(InvalidType, match="got ndarray, OptState"):
            use(params.buffer, state, batch_of(TINY))
    with pytest.raises(InvalidType, match="GPTConfig or a function"):
        make_train_step("gpt2")
    with pytest.raises(InvalidValue, match="remat"):
        make_train_step(quadratic, TrainConfig(remat="full"))
    with pytest.raises(InvalidType, match="make_train_step returns"):
        donate(quadratic)
    other, _ = init(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=11), 0, "fp32", "cpu")
    with pytest.raises(InvalidValue, match="another layout"):
        make_train_step(TINY)(other, state, batch_of(TINY))


def test_all_three_dtypes_exist():
    for dtype, want in zip(DTYPES, (np.float32, np.float16, ml_dtypes.bfloat16), strict=True):
        assert init(TINY, 0, dtype, "cpu")[0].dtype == want


def test_an_error_inside_a_donated_step_loses_nothing():
    params, state = init(TINY, 0, "fp32", "cpu")
    step, long = donate(make_train_step(TINY)), batch_of(TINY, T=9)  # block_size is 8
    before = state_arrays(params, state)
    with pytest.raises(InvalidValue):
        step(params, state, long)
    assert all(np.array_equal(x, y) for x, y in zip(before, state_arrays(params, state), strict=True))
    step(params, state, batch_of(TINY))


def take_too_much():
    return np.empty(1 << 50, np.uint8)  # more than a process can address


@pytest.mark.parametrize("mode", [lambda step: step, donate])
def test_a_step_without_enough_memory_says_what_to_do_and_loses_nothing(monkeypatch, mode):
    """Each array in turn is the one that there is no memory for; then there is, and the step is the same."""
    from nbtrain import train

    batch, config = batch_of(TINY, A=2), TrainConfig(lr=1e-2)
    want = make_train_step(TINY, config)(*init(TINY, 0, "bf16", "cpu"), batch)
    places = ("decay_flags", "like", "batch_check", "global_norm", "control")
    for place in places:
        params, state = init(TINY, 0, "bf16", "cpu")
        before = state_arrays(params, state)
        step = mode(make_train_step(TINY, config))
        with monkeypatch.context() as patch:
            owner = {"decay_flags": Layout, "like": Tree}.get(place, train)
            patch.setattr(owner, place, lambda *args, **options: take_too_much())
            with pytest.raises(Unavailable, match=r"1\.00 PiB.* smaller B or with remat=.full.; nb\.plan"):
                step(params, state, batch)
        assert all(np.array_equal(x, y) for x, y in zip(before, state_arrays(params, state), strict=True))
        *got, metrics = step(params, state, batch)
        assert same(got, want[:2]) and metrics.read() == want[2].read(), place


def test_a_model_without_enough_memory_says_what_to_do():
    policy = Path("/proc/sys/vm/overcommit_memory")
    if policy.exists() and policy.read_text().strip() == "1":
        pytest.skip("this system promises memory that it does not have")
    with pytest.raises(
        Unavailable, match="a new model takes more memory than is free.* Take a smaller model"
    ):
        init(GPTConfig(n_layer=1000, n_embd=32768, n_head=4), 0, "fp32", "cpu")


def test_an_evaluation_without_enough_memory_says_what_to_do(monkeypatch):
    from nbtrain import train

    params, _ = init(TINY, 0, "fp32", "cpu")
    monkeypatch.setattr(train, "sum_losses", lambda losses: take_too_much())
    with pytest.raises(Unavailable, match="an evaluation takes more memory than is free.* smaller B"):
        make_eval_step(TINY)(params, batch_of(TINY))


def test_metrics_are_used_as_arrays_of_their_dtype():
    params, state = init(TINY, 0, "fp32", "cpu")
    *_, metrics = make_train_step(TINY)(params, state, batch_of(TINY))
    loss, n = np.float32(metrics.loss.item()), metrics.n_targets
    assert n.item() == 16 and 1 < loss < 10
    for got, want in (
        (metrics.loss * 2, loss * 2),
        (1.0 + metrics.loss, np.float32(1) + loss),
        (-metrics.loss, -loss),
        (metrics.loss / metrics.n_targets, loss / np.int64(16)),
        (np.log(metrics.loss), np.log(loss)),
        (sum([metrics.loss, metrics.loss]), loss + loss),
        (n // 3, np.int64(5)),
        (~metrics.skipped, np.True_),
        (metrics.loss < 3, loss < 3),
        (metrics.loss == loss, np.True_),
        (metrics.loss != loss, np.False_),
        (3 > metrics.loss, loss < 3),
    ):
        assert got == want and got.dtype == want.dtype
    for field, dtype in (("loss", "f4"), ("grad_norm", "f4"), ("skipped", "?"), ("n_targets", "i8")):
        scalar = getattr(metrics, field)
        assert scalar.dtype == np.asarray(scalar).dtype == dtype and np.asarray(scalar).shape == ()
    assert np.array([metrics.loss, metrics.grad_norm]).dtype == np.float32
    assert np.asarray(metrics.loss, np.float64).dtype == np.float64
    assert (round(metrics.loss, 1), round(n)) == (round(float(loss), 1), 16)
    assert f"{metrics.loss:.3f} {n}" == f"{float(loss):.3f} 16"
    with pytest.raises(TypeError, match="unhashable"):
        hash(metrics.loss)
    with pytest.raises(AttributeError, match="metrics have loss, grad_norm"):
        metrics.los  # noqa: B018


def test_adding_to_a_metric_makes_another_number():
    params, state = init(TINY, 0, "fp32", "cpu")
    *_, metrics = make_train_step(TINY)(params, state, batch_of(TINY))
    loss, total = metrics.loss.item(), metrics.loss
    total += metrics.loss
    assert total == np.float32(2 * loss) and metrics.loss.item() == loss
    sums = np.zeros(2, np.float32)
    before = sums
    sums += metrics.loss
    assert before is sums and sums.tolist() == [loss, loss]


@pytest.mark.parametrize("read", [False, True])
def test_a_metric_that_is_kept_does_not_keep_the_batch(read):
    params, state = init(TINY, 0, "fp32", "cpu")
    batch = batch_of(TINY)
    tokens = weakref.ref(batch.tokens)
    gc.disable()  # what must wait for it is kept too long
    try:
        *_, metrics = make_train_step(TINY)(params, state, batch)
        loss = metrics.loss
        value = loss.item() if read else None
        values = weakref.ref(metrics.on_device[0]) if metrics.on_device else None
        del metrics, batch
        if read:
            assert tokens() is None and loss.item() == value
        else:
            assert tokens() is not None and values() is not None
            del loss
            assert tokens() is None and values() is None
    finally:
        gc.enable()


def test_a_bad_id_is_told_at_every_read():
    from nbtrain.train import Metrics

    batch = batch_of(TINY)
    batch.targets[0, 1, 2] = 65_000
    metrics = Metrics(np.zeros(8, np.float32), np.array([15, -1, 10], np.int32), batch)
    for _ in range(2):
        with pytest.raises(InvalidValue, match=r"targets\[0, 1, 2\] is 65000"):
            metrics.loss + 1


def test_params_of_another_model_are_refused():
    other = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=11)
    params, state = init(other, 0, "fp32", "cpu")
    for use in (
        lambda: make_train_step(TINY)(params, state, batch_of(TINY)),
        lambda: make_eval_step(TINY)(params, batch_of(TINY)),
    ):
        with pytest.raises(InvalidValue, match="one configuration"):
            use()


def test_the_first_step_on_a_gpu_has_its_kernels_compiled_ahead(monkeypatch):
    from nbtrain import train

    orders = []
    monkeypatch.setattr(train, "device_of", lambda x: "plan" if isinstance(x, Outline) else "cuda:0")
    monkeypatch.setattr(train, "use", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        train, "to_device", lambda x, device: to_device(x, "plan" if device == "plan" else "cpu")
    )
    monkeypatch.setattr(train, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(train, "backend", SimpleNamespace(architecture=lambda: "sm_90a"))
    monkeypatch.setattr(train, "room", lambda: ("cublaslt", "because of a test"))
    monkeypatch.setattr(train, "compile_ahead", lambda card, *order: orders.append((card, *order)))
    params, state = init(TINY, 0, "bf16", "cpu")
    step = make_train_step(TINY, TrainConfig(remat="full"))
    batch = batch_of(TINY)
    step(params, state, batch)
    step(params, state, batch)
    ((card, architecture, _, order),) = orders
    assert architecture == order["architecture"] == "sm_90a" and card.capability == (9, 0)
    assert card.workspace_bytes == order["workspace"] > 0
    assert order["shape"] == batch.tokens.shape and order["dtype"] == "bf16"
    assert order["train"]["remat"] == "full" and len(card.launches) > 0
    assert not order["in_place"]
    donate(make_train_step(TINY))(*init(TINY, 0, "bf16", "cpu"), batch)
    assert orders.pop()[-1]["in_place"]
    own = make_train_step(lambda *args, out, **options: out.buffer.fill(0) or np.zeros(1, np.float32))
    own(params, state, batch)  # another process could not make this one
    assert len(orders) == 1


class FakeGraph:
    """What a graph does, by running the work again."""

    def __init__(self, warm_up, work):
        warm_up()
        self.launch = work


@pytest.fixture
def captured(monkeypatch):
    """`capture` on the CPU: the bookkeeping around the graph is what is tested."""
    from nbtrain import modes, train

    monkeypatch.setattr(modes, "Graph", FakeGraph)
    monkeypatch.setattr(modes, "device_of", lambda x: "cuda:0")
    monkeypatch.setattr(train, "to_device", lambda x, device: x)
    monkeypatch.setattr(modes, "use", lambda device: contextlib.nullcontext())
    return modes.capture


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_captured_step_gives_the_donated_bits_over_two_shapes(captured, dtype):
    fast, slow = (
        captured(make_train_step(TINY, TrainConfig(lr=1e-2))),
        make_train_step(TINY, TrainConfig(lr=1e-2)),
    )
    a, b = init(TINY, 1, dtype, "cpu"), init(TINY, 1, dtype, "cpu")
    for i in range(6):
        batch = batch_of(TINY, A=1 + i % 2, seed=i)
        *a, metrics = fast(*a, batch)
        *b, other = slow(*b, batch)
        assert same(a, b) and metrics.read() == other.read()


def test_the_kernels_compiled_ahead_of_a_captured_step_update_in_place(captured, monkeypatch):
    from nbtrain.train import TrainStep

    asked = []
    monkeypatch.setattr(
        TrainStep, "_compile_ahead", lambda self, params, shape, in_place: asked.append(in_place)
    )
    captured(make_train_step(TINY))(*init(TINY, 0, "bf16", "cpu"), batch_of(TINY))
    assert asked == [True]


def test_a_snapshot_of_a_captured_run_can_be_gone_back_to(captured):
    step = captured(make_train_step(TINY, TrainConfig(lr=1e-2)))
    first, state0 = init(TINY, 0, "bf16", "cpu")
    params, state, _ = step(first, state0, batch_of(TINY, seed=0))
    assert int(state0.step[0]) == 0 and int(state.step[0]) == 1
    kept = params.copy(), state._replace(master=state.master.copy(), m=state.m.copy(), v=state.v.copy())
    runs = []
    for _ in range(2):
        params, state = kept[0].copy(), kept[1]
        state = state._replace(master=state.master.copy(), m=state.m.copy(), v=state.v.copy())
        for i in (1, 2):
            params, state, _ = step(params, state, batch_of(TINY, seed=i))
        assert int(kept[1].step[0]) == 1 and int(state.step[0]) == 3
        runs.append(state_arrays(params, state))
    assert all(np.array_equal(x, y) for x, y in zip(*runs, strict=True))


def test_a_captured_step_reads_the_limits_of_every_call(captured):
    step = captured(make_train_step(TINY, TrainConfig(lr=1e-2)))
    params, state = init(TINY, 0, "fp32", "cpu")
    skipped = []
    for largest in (None, 1e-3, np.inf, 1e-3):
        limits = None if largest is None else np.array([largest, np.inf], np.float32)
        params, state, metrics = step(params, state._replace(limits=limits), batch_of(TINY))
        skipped.append(bool(metrics.skipped))
    assert skipped == [False, True, False, True] and int(state.updates[0]) == 2


def test_what_a_captured_step_returned_is_its_holder_s_to_keep_and_to_write(captured):
    step, other = (make(make_train_step(TINY, TrainConfig(lr=1e-2))) for make in (captured, donate))
    params, state, first = step(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY, seed=0))
    *b, want = other(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY, seed=0))
    state.step[:] = 40
    params, state, second = step(params, state, batch_of(TINY, seed=1))
    assert int(state.step[0]) == 41 and int(state.updates[0]) == 2
    b[1].step[:] = 40
    *b, also = other(*b, batch_of(TINY, seed=1))
    assert first.read() == want.read() != second.read() == also.read()


def test_a_first_call_that_runs_out_of_memory_behind_its_capture_can_be_repeated(captured, monkeypatch):
    from nbtrain import modes

    step, calls = captured(make_train_step(TINY, TrainConfig(lr=1e-2))), []

    def empty(shape, dtype):
        calls.append(shape)
        if len(calls) == 2:
            raise MemoryError
        return np.empty(shape, dtype)

    with monkeypatch.context() as lack:
        lack.setattr(modes, "array_module", lambda x: SimpleNamespace(empty=empty, full=np.full))
        with pytest.raises(Unavailable, match="more memory than is free"):
            step(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY))
    *a, metrics = step(*init(TINY, 1, "fp32", "cpu"), batch_of(TINY))
    *b, want = make_train_step(TINY, TrainConfig(lr=1e-2))(*init(TINY, 1, "fp32", "cpu"), batch_of(TINY))
    assert same(a, b) and metrics.read() == want.read()


def test_a_loss_of_one_s_own_gets_random_bits_and_a_model_without_dropout_none(monkeypatch):
    from nbtrain.device import blas
    from nbtrain.model import GPT

    given = []

    def loss_and_grads(params, batch, *, loss_scale, rng, out):
        given.append((rng and (rng.key.tolist(), rng.row), blas.at_length.get()))
        out.buffer.fill(0)
        return np.ones(1, np.float32)

    params, state = init(TINY, 7, "fp32", "cpu")
    make_train_step(loss_and_grads)(params, state._replace(step=np.array([3], np.int32)), batch_of(TINY, A=2))
    B = batch_of(TINY).tokens.shape[1]
    assert given == [(([7, 0, 3], 0), True), (([7, 0, 3], B), True)] and not blas.at_length.get()
    given.clear()
    monkeypatch.setattr(
        GPT, "loss_and_grads", lambda self, *args, **options: loss_and_grads(*args, **options)
    )
    make_train_step(TINY)(params, state, batch_of(TINY))
    make_train_step(dataclasses.replace(TINY, dropout=0.1))(params, state, batch_of(TINY))
    assert [rng for rng, _ in given] == [None, ([7, 0, 0], 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [lambda step: step, donate])
def test_weights_beside_another_s_optimizer_state_are_refused_and_nothing_is_lost(make, dtype):
    """What nb.load gives, with the state of a fresh nb.init: the step would train the fresh weights."""
    loaded, state = init(TINY, 1, dtype, "cpu")
    fresh, other = init(TINY, 2, dtype, "cpu")
    step = make(make_train_step(TINY, TrainConfig(lr=1e-2)))
    with pytest.raises(
        InvalidValue, match=r"other weights than opt_state.master .* nb.init_opt_state\(params\)"
    ):
        step(loaded, other, batch_of(TINY))
    assert np.isfinite(loaded.buffer.astype(np.float32)).all() and int(other.step[0]) == 0
    step(loaded, state, batch_of(TINY))
    step(fresh, init_opt_state(fresh), batch_of(TINY))


def test_weights_that_are_not_finite_are_those_of_their_master():
    params, state = init(TINY, 1, "bf16", "cpu")
    state.master.buffer[5:7] = np.nan, np.inf
    params.buffer[5:7] = np.nan, np.inf
    _, _, metrics = make_train_step(TINY)(params, state, batch_of(TINY))
    assert metrics.skipped


def test_a_captured_step_takes_its_own_params_with_a_new_optimizer_state(captured):
    step = captured(make_train_step(TINY, TrainConfig(lr=1e-2)))
    params, state, _ = step(*init(TINY, 0, "bf16", "cpu"), batch_of(TINY))
    fresh = init_opt_state(params, state.master)
    params, state, _ = step(params, fresh, batch_of(TINY))
    assert int(state.step[0]) == 1 and int(state.updates[0]) == 1
    step(params, state, batch_of(TINY))
    with pytest.raises(InvalidValue, match="donated"):
        step(params, state, batch_of(TINY))


def test_a_captured_step_without_memory_for_its_results_has_changed_nothing(captured, monkeypatch):
    from nbtrain import modes

    step = captured(make_train_step(TINY, TrainConfig(lr=1e-2)))
    params, state, _ = step(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY))
    before = params.buffer.tobytes()

    def empty(shape, dtype):
        raise MemoryError

    with monkeypatch.context() as lack:
        lack.setattr(modes, "array_module", lambda x: SimpleNamespace(empty=empty))
        with pytest.raises(Unavailable, match="more memory than is free"):
            step(params, state, batch_of(TINY))
    assert params.buffer.tobytes() == before and int(state.step[0]) == 1
    _, state, _ = step(params, state, batch_of(TINY))
    assert int(state.step[0]) == 2


def test_a_capture_that_fails_loses_nothing(captured, monkeypatch):
    from nbtrain import modes

    class Broken:
        def __init__(self, warm_up, work):
            warm_up()
            take_too_much()

    params, state = init(TINY, 0, "fp32", "cpu")
    step = captured(make_train_step(TINY))
    monkeypatch.setattr(modes, "Graph", Broken)
    with pytest.raises(Unavailable, match="a training step takes more memory than is free"):
        step(params, state, batch_of(TINY))
    assert np.isfinite(params.buffer).all() and int(state.step[0]) == 0


def test_capture_refuses_a_step_that_has_run_and_trees_of_another_dtype(captured):
    step = make_train_step(TINY)
    step(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY))
    with pytest.raises(InvalidValue, match="has not run"):
        captured(step)
    step = captured(make_train_step(TINY))
    step(*init(TINY, 0, "fp32", "cpu"), batch_of(TINY))
    with pytest.raises(InvalidValue, match="this captured step holds"):
        step(*init(TINY, 0, "bf16", "cpu"), batch_of(TINY))
