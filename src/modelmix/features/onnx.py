"""Features from an ONNX file, which is a graph of operators and not a program."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.features.extractor import Extractor
from modelmix.features.inputs import Inputs
from modelmix.features.local import read_with_digest

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}


def onnx_file(
    path: str | Path, inputs: Inputs, device: torch.device | str = "cpu", *, unit_length: bool = False
) -> Extractor:
    """Make an extractor of the one output of an ONNX network with one input N x 3 x H x W.

    Where the file fixes H and W, images are resized to them. An input of bytes gets grey levels 0 to 255.

    Args:
        inputs: what else the network takes.
        device: the accelerator's kernels are used if this is one and onnxruntime has them.
    """
    data, digest = read_with_digest(path)
    session = _session(data, path, device)
    (taken,) = session.get_inputs() if len(session.get_inputs()) == 1 else (None,)
    if taken is None or len(session.get_outputs()) != 1:
        raise ModelMixError(f"{path} has several inputs or outputs: export a network with one of each.")
    shape = taken.shape
    if taken.type not in _TYPES or len(shape) != 4 or shape[1] not in (3, None):
        raise ModelMixError(f"{path} takes {taken.type} {shape}: it must take floats or bytes N x 3 x H x W.")
    inputs = _sized(path, inputs, shape)
    size = 1 if isinstance(shape[0], int) else None
    if isinstance(shape[0], int) and shape[0] != 1:
        raise ModelMixError(f"{path} takes {shape[0]} images at once: export it with a free first axis, or with 1.")
    function = _function(session, taken.name, _TYPES[taken.type], inputs, size)
    return Extractor("onnx", str(path), function, {"weights": digest, "inputs": inputs.parameters}, unit_length)


def _session(data: bytes, path: str | Path, device: torch.device | str) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise ModelMixError(f"{path} needs onnxruntime: install it with pip install 'modelmix[onnx]'.") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    wanted = ["CUDAExecutionProvider"] if torch.device(device).type == "cuda" else []
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    with tempfile.TemporaryDirectory() as nothing:
        # Weights in files beside it would escape the hash, and could be any file: they are sought in an empty folder.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", nothing)
        try:
            return onnxruntime.InferenceSession(data, options, [*providers, "CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own, of many kinds
            why = " ".join(str(error).split())[:200]
            raise ModelMixError(
                f"{path} is not an ONNX network that can be run: {why}. Export it again, with its weights inside."
            ) from None


def _sized(path: str | Path, inputs: Inputs, shape: list[Any]) -> Inputs:
    fixed = [side for side in shape[2:] if isinstance(side, int)]
    if not fixed:
        return inputs
    if len(set(fixed)) > 1 or (inputs.size is not None and inputs.size != fixed[0]):
        raise ModelMixError(f"{path} takes images {shape[2]} x {shape[3]}: they must be square, and feature_size that.")
    return Inputs(fixed[0], inputs.pixels)


def _function(session: Any, name: str, dtype: Any, inputs: Inputs, size: int | None) -> Callable[[Tensor], Tensor]:
    def function(images: Tensor) -> Tensor:
        x = inputs.resize(images).round() if dtype is np.uint8 else inputs(images)
        parts = np.split(x.numpy().astype(dtype), len(x)) if size else [x.numpy().astype(dtype)]
        return torch.from_numpy(np.concatenate([session.run(None, {name: part})[0] for part in parts]))

    return function
