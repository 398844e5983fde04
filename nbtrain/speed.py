"""Model FLOP utilisation: what share of a GPU's matrix peak the model's own arithmetic makes.

    FLOP a token = 6 N + 12 L C T       N = 12 L C**2 + V C, the weights of the matrix products
    MFU = tokens per second * FLOP a token / peak

6 N: two for each weight forward, four backward. 12 L C T: the scores and their product with the values, as if
attention were not causal (Chowdhery et al., 2022). V is the padded vocabulary. Recomputation counts as
nothing: it is no progress.
"""

import re

from nbtrain.config import GPTConfig

# Dense fp16 and bf16 products with fp32 sums, TFLOP/s, by the name that the driver tells, from NVIDIA's data
# sheets (H200, H100, A100, A40, A30, A10, L40S, L40, L4, RTX A6000, T4, V100; sparse figures halved) and, for
# GeForce, the tables of the architecture whitepapers (Turing, Ampere GA102, Ada, Blackwell).
PEAK_TFLOPS = {
    r"H200": 989.4,
    r"H100 80GB HBM3": 989.4,
    r"H100 NVL|H200 NVL": 835.5,
    r"H100 PCIe": 756.5,
    r"A100[- ](SXM4|SXM|PCIE|PCIe)-(40|80)GB|A100 80GB PCIe": 312.0,
    r"A40": 149.7,
    r"A30": 165.0,
    r"A10": 125.0,
    r"L40S": 362.1,
    r"L40": 181.1,
    r"L4": 121.0,
    r"RTX A6000": 154.8,
    r"T4": 65.0,
    r"V100-SXM2-(16|32)GB": 125.0,
    r"V100-PCIE-(16|32)GB": 112.0,
    r"GeForce RTX 5090": 209.5,
    r"GeForce RTX 4090": 165.2,
    r"GeForce RTX 4080": 97.5,
    r"GeForce RTX 3090": 71.0,
    r"GeForce RTX 2080 Ti": 53.8,
}


def flop_per_token(config: GPTConfig) -> int:
    """Floating-point operations of a training step for each token."""
    L, C = config.n_layer, config.n_embd
    n = 12 * L * C**2 + config.padded_vocab_size * C
    return 6 * n + 12 * L * C * config.block_size


def peak_flop_per_s(name: str, dtype: str) -> float | None:
    """The dense matrix peak of the device called `name` in "fp16" or "bf16"; None where it is not known, and
    for fp32, whose products use other units."""
    if dtype not in ("fp16", "bf16"):
        return None
    short = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    for form, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(form, short):
            return tflops * 1e12
    return None
