"""Operators against the node tests that onnx ships."""

import numpy as np

from nbtrain.ops.cross_entropy import cross_entropy_forward
from nbtrain.ops.gelu import gelu_forward
from nbtrain.ops.layernorm import layernorm_forward
from nbtrain.ops.softmax import softmax_forward
from tests import onnx_cases, reference
from tests.helpers import assert_close


@onnx_cases.each(onnx_cases.softmax_cases)
def test_softmax(xp, case):
    y = softmax_forward(xp.asarray(case.inputs.x))
    assert_close(y, case.outputs.y, np.float32)


@onnx_cases.each(onnx_cases.layernorm_cases)
def test_layernorm(xp, case):
    x, weight, bias = (xp.asarray(a) for a in (case.inputs.x, case.inputs.weight, case.inputs.bias))
    y, mean, rstd, _ = layernorm_forward(x, weight, bias, eps=case.inputs.eps)
    assert_close(y, case.outputs.y, np.float32)
    assert_close(mean, case.outputs.mean, np.float32, name="mean")
    assert_close(rstd, case.outputs.rstd, np.float32, name="rstd")


@onnx_cases.each(onnx_cases.gelu_cases)
def test_gelu(xp, case):
    y = gelu_forward(xp.asarray(case.inputs.x))
    assert_close(y, case.outputs.y, np.float32)


@onnx_cases.each(onnx_cases.cross_entropy_cases)
def test_cross_entropy(xp, case):
    i = case.inputs
    losses, lse = cross_entropy_forward(
        xp.asarray(i.logits), xp.asarray(i.targets), ignore_index=i.ignore_index
    )
    log_probs = i.logits - reference.host(lse)[:, None]
    losses = reference.f64(losses)
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / np.sum(i.targets != i.ignore_index)}
    assert_close(loss[i.reduction], case.outputs.loss, np.float32, name="loss")
    assert_close(log_probs, case.outputs.log_probs, np.float32, name="log_probs")


@onnx_cases.each(onnx_cases.adam_cases)
def test_adamw_reference(case):
    i = case.inputs
    got = reference.adamw(i.p, i.g, i.m, i.v, i.updates, lr=i.lr, betas=i.betas, eps=i.eps, decay=False)
    for name, a in zip("pmv", got, strict=True):
        assert_close(a, getattr(case.outputs, name), np.float32, name=name)
