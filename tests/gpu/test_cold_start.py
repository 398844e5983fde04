"""The first step where nothing has been compiled yet."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
import nbtrain as nb
from nbtrain import train
from nbtrain.device import ahead, packed
from nbtrain.device.binaries import path_of

walked, loaded = {{}}, {{}}  # files by the kernel that they hold
ahead.cores = lambda: 4
compile_ahead, cached_binary = train.compile_ahead, packed.cached_binary


def noting_ahead(card, architecture, *order):
    walked.update((name, file.kernel) for name, file in ahead._files(card, architecture).items())
    return compile_ahead(card, architecture, *order)


def noting_binary(kernel, types, architecture, compile_):
    loaded[path_of(kernel, types, architecture).name] = kernel
    return cached_binary(kernel, types, architecture, compile_)


train.compile_ahead, packed.cached_binary = noting_ahead, noting_binary
config = nb.GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=97, dropout={dropout})
params, state = nb.init(config, dtype="{dtype}", device="{device}")
before = list(loaded)
tokens = np.arange(2 * {micro} * 65).reshape({micro}, 2, 65) % 97
step = nb.make_train_step(config, nb.TrainConfig(remat="{remat}"))
step = getattr(nb, "{mode}", lambda pure: pure)(step)
_, _, metrics = step(params, state, nb.Batch.of(tokens[..., :-1], tokens[..., 1:]))
assert np.isfinite(float(metrics.loss))
for one, other in ((walked, loaded), (loaded, {{**walked, **dict.fromkeys(before)}})):
    print(len(one), [kernel.py_func.__name__ for name, kernel in one.items() if name not in other])
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="bf16", dropout=0.0, micro=1, mode="capture", remat="light"),
        dict(dtype="bf16", dropout=0.0, micro=1, mode="pure", remat="none"),
        dict(dtype="fp16", dropout=0.1, micro=2, mode="donate", remat="full"),
        dict(dtype="fp32", dropout=0.0, micro=1, mode="capture", remat="every:2"),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_a_walk_sees_is_what_the_first_step_loads(options, tmp_path, request):
    """Workers compile the kernels of the walk, launches what else they need: both are the same."""
    script = SCRIPT.format(device=request.config.getoption("--device"), **options)
    environment = os.environ | {"NBTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=200,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (n_walked, never_loaded), (_, loaded_besides) = (line.split(" ", 1) for line in done.stdout.splitlines())
    assert int(n_walked) > 20 and never_loaded == loaded_besides == "[]"
    assert re.search(r"compiled \d+ kernels in ", done.stderr) and "ended early" not in done.stderr
