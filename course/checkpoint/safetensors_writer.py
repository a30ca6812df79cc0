"""Write safetensors files one tensor at a time; the format's own writer needs all of them at once.

A file has eight bytes with the length of a JSON header, the header (name -> dtype, shape, first byte and one past the last), and
the bytes of the tensors.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

Head = tuple[str, torch.dtype, tuple[int, ...]]      # name, dtype and shape of a tensor to be written
# safetensors' names of the dtypes in our runs and in files from elsewhere
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def stream(file: Path, heads: list[Head], tensors: Iterable[Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write a file of the tensors that `heads` announce: copy one to the host, write it, then take the next.

    about: metadata for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, dtype, shape in heads:
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                  # so that the numbers are aligned
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for (name, dtype, shape), tensor in zip(heads, tensors, strict=True):
            assert (tensor.dtype, tensor.numel()) == (dtype, torch.Size(shape).numel()), name
            out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
