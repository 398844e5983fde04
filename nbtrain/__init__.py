"""Trains GPT-style language models with kernels written in Python."""

from nbtrain import ops as ops
from nbtrain.batch import Batch as Batch
from nbtrain.checkpoint import load as load
from nbtrain.checkpoint import save as save
from nbtrain.config import GPTConfig as GPTConfig
from nbtrain.config import TrainConfig as TrainConfig
from nbtrain.data import batches as batches
from nbtrain.data import eval_batches as eval_batches
from nbtrain.decode import Decoder as Decoder
from nbtrain.errors import InvalidType as InvalidType
from nbtrain.errors import InvalidValue as InvalidValue
from nbtrain.errors import NbtrainError as NbtrainError
from nbtrain.errors import Unavailable as Unavailable
from nbtrain.generate import generate as generate
from nbtrain.generate import generate_stream as generate_stream
from nbtrain.huggingface import load_pretrained as load_pretrained
from nbtrain.huggingface import save_pretrained as save_pretrained
from nbtrain.modes import capture as capture
from nbtrain.modes import donate as donate
from nbtrain.plan import plan as plan
from nbtrain.train import Metrics as Metrics
from nbtrain.train import OptState as OptState
from nbtrain.train import init as init
from nbtrain.train import init_opt_state as init_opt_state
from nbtrain.train import make_eval_step as make_eval_step
from nbtrain.train import make_train_step as make_train_step

__version__ = "0.1.0.dev0"
