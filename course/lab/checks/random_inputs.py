"""From a seed of any size to what an exercise draws: no bit of it is lost.

PyTorch's generator on a CPU (a Mersenne Twister) takes 32 bits of a seed, so that all draws of exercises could be tried in an
hour. Seeds below 2**32, which `check` draws, give what PyTorch gives for them.
"""

import numpy as np
import torch

from course.utils import random

MAX_TORCH_SEED = 2**32                               # seeds of which PyTorch's generator takes every bit
STATE_OFFSET = 24                                    # bytes in front of the twister's words in the generator's state
STATE_WORDS = 624                                    # of 32 bits, each kept in 64


def generator(seed: int) -> torch.Generator:
    """PyTorch's generator, started from every bit of the seed."""
    if seed < MAX_TORCH_SEED:
        return torch.Generator().manual_seed(seed)
    made = torch.Generator().manual_seed(0)          # which has drawn nothing: the first draw mixes its words
    state = made.get_state()
    words = np.random.SeedSequence(seed).generate_state(STATE_WORDS).astype(np.int64)
    state[STATE_OFFSET:STATE_OFFSET + 8 * STATE_WORDS] = torch.from_numpy(words).view(torch.uint8)
    made.set_state(state)
    return made


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Standard normal numbers of this shape, float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def number(seed: int) -> int:
    """A number for the seed, of at most 63 bits, that fits into a tensor: what a program draws from when it runs."""
    return seed % 2**31 if seed < MAX_TORCH_SEED else random.key(seed)
