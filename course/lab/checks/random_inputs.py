"""Draw an exercise's inputs from a seed of any size, using all its bits.

PyTorch's CPU generator (a Mersenne Twister) uses only 32 bits of a seed, so one could try all inputs of an exercise in an hour.
For seeds below 2**32, which `check` draws, the numbers are PyTorch's own.
"""

import numpy as np
import torch

from course.utils import random

MAX_TORCH_SEED = 2**32                               # PyTorch's generator uses all bits of seeds below this
STATE_OFFSET = 24                                    # bytes before the twister's words in the generator's state
STATE_WORDS = 624                                    # words of 32 bits, each stored in 64


def generator(seed: int) -> torch.Generator:
    """A PyTorch generator seeded with all bits of the seed."""
    if seed < MAX_TORCH_SEED:
        return torch.Generator().manual_seed(seed)
    made = torch.Generator().manual_seed(0)          # has drawn nothing yet: its first draw mixes the words
    state = made.get_state()
    words = np.random.SeedSequence(seed).generate_state(STATE_WORDS).astype(np.int64)
    state[STATE_OFFSET:STATE_OFFSET + 8 * STATE_WORDS] = torch.from_numpy(words).view(torch.uint8)
    made.set_state(state)
    return made


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Standard normal numbers of this shape, float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def number(seed: int) -> int:
    """A number of at most 63 bits for the seed. It fits into a tensor; programs seed their own draws with it."""
    return seed % 2**31 if seed < MAX_TORCH_SEED else random.key(seed)
