"""A process that compiles kernels for another (`nbtrain.device.ahead`): python -m nbtrain.compile_worker."""

import json
import sys

from nbtrain.config import GPTConfig, TrainConfig, from_dict
from nbtrain.device.ahead import serve
from nbtrain.train import walk


def main() -> None:
    order = json.loads(sys.stdin.readline())
    config, train = from_dict(GPTConfig, order["config"]), from_dict(TrainConfig, order["train"])
    what = (order[name] for name in ("dtype", "shape", "in_place", "capability", "workspace"))
    serve(walk(config, train, *what), order["architecture"])


if __name__ == "__main__":
    main()
