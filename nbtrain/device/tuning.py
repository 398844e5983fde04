"""Block shapes of every kernel, in one table.

Measured on an NVIDIA H200 at 32,768 rows of 768, fp16 (see docs/speed.md). The simulator takes tiny blocks:
it runs every thread of a block as a Python thread.
"""

from nbtrain.device.backend import SIMULATED

BLOCKS = {
    # op: (threads a block, blocks of a persistent grid; 0 where the grid follows the size)
    "layernorm_forward": (192, 0),
    "layernorm_backward": (192, 660),
    "sum_blocks": (128, 0),
    "linear_bias": (256, 0),
    "sum_rows": (256, 1056),
    "gelu_forward": (384, 0),
    "gelu_backward": (256, 1536),
    "dropout": (256, 0),
    "cast": (256, 0),
    "softmax_forward": (128, 0),
    "softmax_backward": (128, 0),
    "global_norm": (512, 528),
    "adamw": (256, 0),
    "cross_entropy": (512, 0),
    "sum_losses": (1024, 0),
    "embedding_forward": (96, 0),
    "embedding_backward": (256, 0),
    "batch_check": (256, 132),  # a power of two
    "embedding_decode": (192, 0),
    "attention_decode": (512, 0),
    "sample": (512, 0),
}
SIMULATED_BLOCKS = {name: (8, 3 if grid else 0) for name, (_, grid) in BLOCKS.items()}


def tuned(name: str) -> tuple[int, int]:
    """(threads a block, blocks of a persistent grid) of a kernel."""
    return (SIMULATED_BLOCKS if SIMULATED else BLOCKS)[name]


def row_shape(name: str, row_length: int, vectors: int) -> tuple[int, int]:
    """(threads a row, rows a block) for rows read eight elements at a time, at most `vectors` eights a
    thread.

    Threads a row are the fewest whole warps that hold the row; rows fill up the block.
    """
    threads, _ = tuned(name)
    warp = 4 if SIMULATED else 32
    eights = -(-row_length // 8)
    per_row = min(-(-eights // (vectors * warp)) * warp, 1024)
    return per_row, max(1, threads // per_row)
