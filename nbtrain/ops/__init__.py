"""The operators by themselves, on NumPy and CuPy arrays and on anything with DLPack."""

from nbtrain.ops.adamw import adamw as adamw
from nbtrain.ops.attention import attention_backward as attention_backward
from nbtrain.ops.attention import attention_forward as attention_forward
from nbtrain.ops.attention_decode import attention_decode as attention_decode
from nbtrain.ops.batch_check import batch_check as batch_check
from nbtrain.ops.cast import cast_and_scale as cast_and_scale
from nbtrain.ops.cross_entropy import cross_entropy_backward as cross_entropy_backward
from nbtrain.ops.cross_entropy import cross_entropy_forward as cross_entropy_forward
from nbtrain.ops.cross_entropy import cross_entropy_forward_backward as cross_entropy_forward_backward
from nbtrain.ops.cross_entropy import sum_losses as sum_losses
from nbtrain.ops.dropout import dropout_backward as dropout_backward
from nbtrain.ops.dropout import dropout_forward as dropout_forward
from nbtrain.ops.embedding import embedding_backward as embedding_backward
from nbtrain.ops.embedding import embedding_forward as embedding_forward
from nbtrain.ops.embedding_decode import embedding_decode as embedding_decode
from nbtrain.ops.gelu import gelu_backward as gelu_backward
from nbtrain.ops.gelu import gelu_forward as gelu_forward
from nbtrain.ops.global_norm import global_norm as global_norm
from nbtrain.ops.layernorm import layernorm_backward as layernorm_backward
from nbtrain.ops.layernorm import layernorm_forward as layernorm_forward
from nbtrain.ops.linear import linear_backward as linear_backward
from nbtrain.ops.linear import linear_forward as linear_forward
from nbtrain.ops.linear import matmul as matmul
from nbtrain.ops.sample import sample as sample
from nbtrain.ops.softmax import softmax_backward as softmax_backward
from nbtrain.ops.softmax import softmax_forward as softmax_forward
