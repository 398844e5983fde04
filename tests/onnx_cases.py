"""The node tests that the onnx package ships, as NumPy cases: an oracle from outside for single operators.

Only what our operators cover: fp32, no class weights. Where the standard allows more axes the data is brought
into our form: LayerNorm over several axes is one long row, a class axis in the middle moves to the end.
onnx 1.18 to 1.21 ship the data; later releases do not.
"""

import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import onnx
import pytest

NODES = Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"
OPERATORS = ("Softmax", "LayerNormalization", "Gelu", "SoftmaxCrossEntropyLoss", "Adam")
MAX_ROWS = 64  # more take too long in the GPU simulator


class Case(NamedTuple):
    name: str
    inputs: SimpleNamespace  # arrays and scalars under our names
    outputs: SimpleNamespace


class Node(NamedTuple):
    name: str
    attributes: dict
    inputs: list
    outputs: list


def each(cases):
    """Parametrizes a test over `cases()`; skips it, outside CI, where this onnx ships no data."""
    try:
        found = [pytest.param(case, id=case.name) for case in cases()]
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        found = [pytest.param(None, marks=pytest.mark.skip(reason=str(error)))]
    return pytest.mark.parametrize("case", found)


def softmax_cases():
    """inputs x (N, L); outputs y."""
    cases = []
    for node in shipped("Softmax"):
        x, y = node.inputs[0], node.outputs[0]
        if node.attributes.get("axis", -1) in (-1, x.ndim - 1):
            L = x.shape[-1]
            cases.append(case(node, dict(x=x.reshape(-1, L)), dict(y=y.reshape(-1, L))))
    return some(cases, "Softmax")


def layernorm_cases():
    """inputs x (N, C), weight (C,), bias (C,), eps; outputs y (N, C), mean (N,), rstd (N,)."""
    cases = []
    for node in shipped("LayerNormalization"):
        x, weight, bias = node.inputs
        y, mean, rstd = node.outputs
        inputs = dict(x=x.reshape(-1, weight.size), weight=weight.ravel(), bias=bias.ravel())
        inputs["eps"] = node.attributes.get("epsilon", 1e-5)
        outputs = dict(y=y.reshape(-1, weight.size), mean=mean.ravel(), rstd=rstd.ravel())
        cases.append(case(node, inputs, outputs))
    return some(cases, "LayerNormalization")


def gelu_cases():
    """The tanh form; inputs x (N, C); outputs y."""
    cases = []
    for node in shipped("Gelu"):
        if node.attributes.get("approximate") == b"tanh":
            x, y = node.inputs[0], node.outputs[0]
            C = x.shape[-1]
            cases.append(case(node, dict(x=x.reshape(-1, C)), dict(y=y.reshape(-1, C))))
    return some(cases, "Gelu")


def cross_entropy_cases():
    """inputs logits (N, V), targets (N,) int32, ignore_index; outputs loss, and log_probs (N, V).

    loss is (N,) where the input `reduction` is "none", 0-d where it is "mean" (of those counted) or "sum"."""
    cases = []
    for node in shipped("SoftmaxCrossEntropyLoss"):
        if len(node.inputs) == 3 or len(node.outputs) == 1 or node.inputs[1].size > MAX_ROWS:
            continue  # class weights; the same data as in a node with log_probs; too many rows
        logits, targets = node.inputs
        loss, log_probs = node.outputs
        V = logits.shape[1]
        logits, log_probs = (np.moveaxis(a, 1, -1).reshape(-1, V) for a in (logits, log_probs))
        inputs = dict(logits=np.ascontiguousarray(logits), targets=targets.ravel().astype(np.int32))
        inputs["ignore_index"] = node.attributes.get("ignore_index", -100)
        inputs["reduction"] = node.attributes["reduction"].decode()
        outputs = dict(loss=loss.ravel() if loss.ndim else loss, log_probs=log_probs)
        cases.append(case(node, inputs, outputs))
    return some(cases, "SoftmaxCrossEntropyLoss")


def adam_cases():
    """inputs p, g, m, v (n,), lr, betas, eps, updates; outputs p, m, v. No decoupled decay.

    The standard's decay adds to the gradient: it is part of g here. Its step 0 corrects no bias, as a very
    late step does. Several tensors in one node are laid end to end."""
    cases = []
    for node in shipped("Adam"):
        (lr, step, *arrays), a = node.inputs, node.attributes
        if step != 0 or a.get("norm_coefficient_post", 0.0) != 0:
            continue
        p, g, m, v = joined(arrays, 4)
        g = g + np.float32(a["norm_coefficient"]) * p
        inputs = dict(p=p, g=g, m=m, v=v, lr=float(lr), betas=(a["alpha"], a["beta"]))
        # The second node's data was made with an epsilon of 1e-2 that the node fails to state.
        eps = 1e-2 if node.name == "test_adam_multiple" else a["epsilon"]
        inputs |= dict(eps=eps, updates=10**6)
        cases.append(case(node, inputs, dict(zip("pmv", joined(node.outputs, 3), strict=True))))
    return some(cases, "Adam")


def joined(arrays, groups):
    """`groups` flat arrays from p1, p2, …, g1, g2, …"""
    n = len(arrays) // groups
    return [np.concatenate(arrays[i : i + n]) for i in range(0, len(arrays), n)]


def case(node, inputs, outputs):
    return Case(node.name, SimpleNamespace(**inputs), SimpleNamespace(**outputs))


def some(cases, op_type):
    """The cases; none at all would leave a test that checks nothing."""
    if not cases:
        raise FileNotFoundError(
            f"onnx {onnx.__version__} has no {op_type} data in {NODES}: install onnx<1.22"
        )
    return cases


def shipped(op_type):
    return [node for kind, node in all_nodes() if kind == op_type]


@functools.cache
def all_nodes():
    """[(op_type, Node)] of every shipped test that is a single fp32 node of ours."""
    nodes = []
    for folder in sorted(NODES.glob("test_*")):
        graph = onnx.load(folder / "model.onnx").graph.node
        if len(graph) == 1 and graph[0].op_type in OPERATORS:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in graph[0].attribute}
            inputs, outputs = (read_arrays(folder / "test_data_set_0", kind) for kind in ("input", "output"))
            if inputs[0].dtype == np.float32:
                nodes.append((graph[0].op_type, Node(folder.name, attributes, inputs, outputs)))
    return nodes


def read_arrays(folder, kind):
    """Arrays 0, 1, … of a kind, "input" or "output"; writable, as the simulator writes back what it took."""
    paths = sorted(folder.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.removeprefix(f"{kind}_")))
    return [np.array(onnx.numpy_helper.to_array(onnx.load_tensor(path))) for path in paths]
