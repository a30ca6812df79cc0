"""Transcripts: the answer's process records each event in a tensor, and the checking process evaluates it.

An answer can forge the outputs of its own process. To forge a flag it only has to know that 1.0 is right. To forge a transcript
it has to know, event by event, what a right answer would do on these inputs.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 1_000_000                                # size limit of a transcript


def pack(events: Sequence[Any]) -> Tensor:
    """Encode events (lists of numbers and strings) as a uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(list(events)).encode()), dtype=torch.uint8)


def unpack(value: Tensor) -> list[Any]:
    """Decode the events of `pack` from an untrusted tensor. Raises ValueError, RecursionError or TypeError if it is invalid."""
    if value.dtype != torch.uint8 or value.dim() != 1 or value.numel() > MAX_BYTES:
        raise ValueError("this is no transcript")
    events = json.loads(value.numpy().tobytes())
    if not isinstance(events, list):
        raise ValueError("this is no transcript")
    return events


def digest(*parts: object) -> float:
    """Hash strings, bytes and numbers to an integer from 1 to 2**52, as float. 0 is free to mark missing values."""
    text = hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()
    return float(1 + int.from_bytes(text[:8], "big") % 2**52)
