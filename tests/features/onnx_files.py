"""Small ONNX files, written byte by byte: the format is protobuf, and a network of one operator needs few fields."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FLOAT, BYTES = 1, 2


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _value(name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    sides = b"".join(_text(1, _number(1, s) if isinstance(s, int) else _text(2, s)) for s in shape)
    return _text(1, name) + _text(2, _text(1, _number(1, kind) + _text(2, sides)))


def _node(operator: str, inputs: Sequence[str], *outputs: str, **numbers: int) -> bytes:
    fields = b"".join(_text(1, name) for name in inputs) + b"".join(_text(2, name) for name in outputs)
    fields += _text(4, operator)
    for name, value in numbers.items():  # attributes, all of them whole numbers
        fields += _text(5, _text(1, name) + _number(3, value) + _number(20, 2))
    return fields


def _weights(values: Sequence[float], width: int, outside: str | None) -> bytes:
    fields = _number(1, len(values) // width) + _number(1, width) + _number(2, FLOAT) + _text(8, "w")
    if outside is not None:
        return fields + _text(13, _text(1, "location") + _text(2, outside)) + _number(14, 1)
    return fields + _text(9, struct.pack(f"<{len(values)}f", *values))


def network(
    weights: Sequence[float],
    width: int,
    shape: Sequence[int | str] = ("N", 3, "H", "W"),
    kind: int = FLOAT,
    *,
    company: bool = False,
    quantised: bool = False,
    outside: str | None = None,
    outputs: int = 1,
) -> bytes:
    """A network of sums over pixels times weights (3 x width).

    Args:
        company: subtracts the mean over the batch, as no feature function may.
        quantised: rounds pixels to 8 bits between the extremes of the batch, as dynamically quantised networks do.
        outside: the name of a file in which the weights are said to lie.
    """
    nodes = [_node("Cast", ["x"], "c" if quantised else "f", to=FLOAT)]
    if quantised:
        nodes += [_node("DynamicQuantizeLinear", ["c"], "q", "s", "o"), _node("DequantizeLinear", ["q", "s", "o"], "f")]
    nodes += [_node("GlobalAveragePool", ["f"], "g"), _node("Flatten", ["g"], "h", axis=1)]
    last = "y0" if not company else "z"
    nodes.append(_node("MatMul", ["h", "w"], last))
    if company:
        nodes += [_node("ReduceMean", ["z", "axis"], "m", keepdims=1), _node("Sub", ["z", "m"], "y0")]
    nodes += [_node("Identity", ["y0"], f"y{i}") for i in range(1, outputs)]
    graph = b"".join(_text(1, node) for node in nodes) + _text(2, "g") + _text(5, _weights(weights, width, outside))
    graph += _text(5, _number(1, 1) + _number(2, 7) + _text(8, "axis") + _text(9, struct.pack("<q", 0)))
    graph += _text(11, _value("x", kind, shape))
    graph += b"".join(_text(12, _value(f"y{i}", FLOAT, ["N", width])) for i in range(outputs))
    return _number(1, 8) + _text(7, graph) + _text(8, _number(2, 18))
