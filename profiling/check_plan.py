"""What `nbtrain.plan` says a run takes, against what it takes on this GPU, by part.

    python -m profiling.check_plan [--preset gpt2 gpt2-medium gpt2-large] [--batch 16 8 4] [--mode capture]
    [--out FOLDER]

Each run is a process of its own: a few steps and an evaluation of zeros, whose memory is any model's.
"arrays" is what CuPy's pools hold at the end, "card" the highest rise of the whole card over idle (NVML),
which nobody else may use meanwhile. The context is what NVML sees at the end beside arrays;
`nbtrain.plan.CONTEXT_BYTES` is its measured value.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from profiling.bench_step import CardMemory
from profiling.timing import RESULTS, machine, write_results

STEPS = 3


def run(preset, B, remat, mode, dtype, micro=1, evaluate=True, **changes) -> dict:
    """Bytes of a run on cuda:0, by part and in all; `changes` are those of the preset's fields."""
    try:
        memory = CardMemory()
    except ImportError:
        memory = None
    import cupy

    from nbtrain.batch import Batch
    from nbtrain.config import GPTConfig, TrainConfig
    from nbtrain.device import FLOATS
    from nbtrain.modes import capture, donate
    from nbtrain.plan import parts_of
    from nbtrain.train import init_opt_state, make_eval_step, make_train_step
    from nbtrain.tree import Layout, Tree

    config = GPTConfig.preset(preset, **changes)
    layout, T = Layout.of(config.leaves()), config.block_size
    params = Tree(layout, cupy.zeros(layout.size, FLOATS[dtype]))
    master = params if dtype == "fp32" else Tree(layout, cupy.zeros(layout.size, np.float32))
    state = init_opt_state(params, master)
    step = make_train_step(config, TrainConfig(remat=remat))
    train = {"pure": lambda step: step, "donate": donate, "capture": capture}[mode](step)
    ids = cupy.zeros((micro, B, T), np.int32)
    order = cupy.broadcast_to(cupy.arange(B * T, dtype=np.int32), (micro, B * T)).copy()
    batch = Batch(ids, ids.copy(), order)
    for _ in range(STEPS):
        params, state, metrics = train(params, state, batch)
    assert not bool(metrics.skipped)
    if evaluate:
        make_eval_step(config)(params, Batch(*(x[:1] for x in batch)))
    cupy.cuda.runtime.deviceSynchronize()
    graphs = [graph.bytes for graph, _ in train._graphs.values()] if mode == "capture" else []
    return dict(
        parts=parts_of(params, state, step, batch, mode),
        pool_bytes=cupy.get_default_memory_pool().total_bytes() + sum(graphs),
        at_the_end_mb=memory and (memory._read() - memory.idle) / 1e6,
        card_mb=memory and memory.rise_mb(),
    )


def child(options: dict, limit: float) -> dict | None:
    command = [sys.executable, "-m", "profiling.check_plan", "--child", json.dumps(options)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"FAILED {options}: longer than {limit} s", flush=True)
        return None
    for line in reversed(result.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    print(f"FAILED {options}\n{result.stderr[-2500:]}", flush=True)
    return None


def compare(options: dict, limit: float) -> dict | None:
    """One run beside its plan: printed by part, returned as a row."""
    from nbtrain.config import GPTConfig
    from nbtrain.plan import CONTEXT_BYTES, plan

    taken = child(options, limit)
    if taken is None:
        return None
    arguments = {name: value for name, value in options.items() if name != "preset"}
    planned = plan(GPTConfig.preset(options["preset"]), device="cuda:0", **arguments)
    arrays = planned.total - planned.given_back - CONTEXT_BYTES["cuda"]
    print(f"\n{options['preset']}, B = {options['B']}, remat {options['remat']}, {options['mode']}")
    print(f"{'MB':32}{'planned':>10}{'taken':>10}{'ratio':>8}")
    for name, n_bytes in planned.parts.items():
        got = taken["parts"].get(name)
        if n_bytes or got:
            seen = "" if got is None else f"{got / 1e6:10,.0f}{n_bytes / max(got, 1):8.3f}"
            print(f"{name:32}{n_bytes / 1e6:10,.0f}{seen}")
    row = options | dict(
        planned_mb=planned.total / 1e6,
        card_mb=taken["card_mb"],
        ratio=taken["card_mb"] and planned.total / 1e6 / taken["card_mb"],
        planned_arrays_mb=arrays / 1e6,
        arrays_mb=taken["pool_bytes"] / 1e6,
        context_mb=taken["at_the_end_mb"] and taken["at_the_end_mb"] - taken["pool_bytes"] / 1e6,
        planned_parts=planned.parts,
        parts=taken["parts"],
    )
    got = taken["pool_bytes"]
    print(f"{'arrays, all':32}{arrays / 1e6:10,.0f}{got / 1e6:10,.0f}{arrays / got:8.3f}")
    if row["card_mb"]:
        print(f"{'card':32}{row['planned_mb']:10,.0f}{row['card_mb']:10,.0f}{row['ratio']:8.3f}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["gpt2", "gpt2-medium", "gpt2-large"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 8, 8], help="one a preset")
    parser.add_argument("--remat", nargs="+", default=[], help="policies; by default all worth a look")
    parser.add_argument("--mode", default="capture", choices=["capture", "donate", "pure"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(run(**json.loads(args.child))), flush=True)
        return

    from nbtrain.config import GPTConfig
    from nbtrain.plan import policies

    print(machine(), flush=True)
    rows = []
    for preset, B in zip(args.preset, args.batch, strict=True):
        for remat in args.remat or policies(GPTConfig.preset(preset).n_layer):
            options = dict(
                preset=preset, B=B, remat=remat, mode=args.mode, dtype=args.dtype, micro=args.micro
            )
            rows += [row for row in [compare(options, args.limit)] if row]
    print("\n| model | B | remat | planned MB | taken MB | ratio | arrays planned | arrays taken | context |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        card = [f"{r[name]:,.0f}" if r[name] else "-" for name in ("card_mb", "context_mb")]
        ratio = f"{r['ratio']:.3f}" if r["ratio"] else "-"
        print(
            f"| {r['preset']} | {r['B']} | {r['remat']} | {r['planned_mb']:,.0f} | {card[0]} | {ratio} | "
            f"{r['planned_arrays_mb']:,.0f} | {r['arrays_mb']:,.0f} | {card[1]} |"
        )
    print(write_results("check_plan", rows, args.out))


if __name__ == "__main__":
    main()
