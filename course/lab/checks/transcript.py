"""What happened, as a tensor: an answer's process writes down each event, and the process that judges counts.

An answer can write what it likes into its own process's outputs. Of a flag it has to know that 1.0 is right; of a transcript it
has to know what a right answer would have done on these inputs, event by event.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 1_000_000                                # bytes of a transcript that anybody reads


def pack(events: Sequence[Any]) -> Tensor:
    """Events, lists of numbers and texts, as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(list(events)).encode()), dtype=torch.uint8)


def unpack(value: Tensor) -> list[Any]:
    """The events of `pack`; ValueError, RecursionError or TypeError if it is something else. For tensors that nobody trusts."""
    if value.dtype != torch.uint8 or value.dim() != 1 or value.numel() > MAX_BYTES:
        raise ValueError("this is no transcript")
    events = json.loads(value.numpy().tobytes())
    if not isinstance(events, list):
        raise ValueError("this is no transcript")
    return events


def digest(*parts: object) -> float:
    """A whole number from 1 to 2**52 that stands for texts, bytes and numbers: 0 is left for what is not there."""
    text = hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()
    return float(1 + int.from_bytes(text[:8], "big") % 2**52)
