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
from nbtrain.device import ahead
from nbtrain.device.cpu import cache_folder

ahead.cores = lambda: 4
config = nb.GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=97, dropout={dropout})
params, state = nb.init(config, dtype="{dtype}", device="{device}")
before = len(list((cache_folder() / "gpu").glob("*.bin")))
tokens = np.arange(2 * {micro} * 65).reshape({micro}, 2, 65) % 97
step = nb.{mode}(nb.make_train_step(config, nb.TrainConfig(remat="{remat}")))
_, _, metrics = step(params, state, nb.Batch.of(tokens[..., :-1], tokens[..., 1:]))
assert np.isfinite(float(metrics.loss))
print(len(list((cache_folder() / "gpu").glob("*.bin"))) - before)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="bf16", dropout=0.0, micro=1, mode="capture", remat="none"),
        dict(dtype="fp16", dropout=0.1, micro=2, mode="donate", remat="full"),
        dict(dtype="fp32", dropout=0.0, micro=1, mode="capture", remat="every:2"),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_a_walk_sees_is_what_the_first_step_loads(options, tmp_path, request):
    """Workers compile the kernels of the walk, launches what else they need: that must be nothing."""
    script = SCRIPT.format(device=request.config.getoption("--device"), **options)
    environment = os.environ | {"NBTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=200,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.search(r"compiled (\d+) kernels in ", done.stderr)
    assert said, done.stderr
    assert int(said[1]) == int(done.stdout) and "ended early" not in done.stderr
