"""The threads loader: a thread pool reads directly into pinned memory; the GPU copies and normalizes on a separate stream.

Reading bytes releases the GIL, so threads read in parallel, without processes to start or copies between them. The data goes
to a ring of pinned buffers, from which the GPU fetches it by DMA: a batch costs the host one read and no copy. On a CPU the
same code runs, and a batch stays in the memory that it was read into.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from course.data.loaders.hdf5_extents import StateReader
from course.data.weather.pairs import Batch, Pairs, sample_ids
from course.utils.errors import CourseError

Staged = tuple[Batch, torch.cuda.Event | None]       # the event: when the batch is complete
LEAST = 1 << 20                                      # bytes of a read: below this, overhead dominates


def loader(pairs: Pairs, batches: Iterable[list[int]], workers: int, ahead: int,
           device: torch.device) -> Generator[Batch, None, None]:
    """The batches of the given sample ids, on the device; `workers` threads read up to `ahead` of them at once.

    A batch that cannot be read raises `CourseError` when its turn comes. Closing the generator ends the threads.
    """
    states, stage = StateReader(pairs), DeviceStage(pairs, device)
    pool = ThreadPoolExecutor(workers, "reader")
    free = deque(Buffer(device) for _ in range(ahead))
    todo = iter(batches)
    reading: deque[BatchRead] = deque()
    ready: deque[Staged] = deque()                   # on the device, or on the way: the next batch, and the one after it
    try:
        while True:
            for samples in islice(todo, len(free)):
                reading.append(BatchRead(samples, free.popleft(), states, pool, workers))
            while reading and (not ready or (len(ready) < 2 and reading[0].is_read())):
                ready.append(stage.send(reading[0]))
                free.append(reading.popleft().buffer)
            if not ready:
                return
            yield stage.hand_over(*ready.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
        states.close()


class Buffer:
    """Pinned memory that holds one batch after another, (2, B, C, H, W): inputs and targets.

    Without a GPU, nothing copies a batch away: it stays in this memory, and the next batch gets new memory.
    """

    def __init__(self, device: torch.device):
        self.pinned = device.type == "cuda"
        self.memory = torch.empty(0)
        self.copied: torch.cuda.Event | None = None  # when the device has fetched the batch

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Memory that may be written."""
        if not self.pinned:
            return torch.from_numpy(np.empty(shape, np.float32))         # NumPy asks for large pages: they come ten times faster
        if self.copied is not None:
            self.copied.synchronize()
        if self.memory.shape != shape:
            self.memory = torch.empty(shape, pin_memory=True)
        return self.memory


class BatchRead:
    """A batch being read from files into a buffer, split into enough reads to keep every thread busy."""

    def __init__(self, samples: list[int], buffer: Buffer, states: StateReader, pool: ThreadPoolExecutor, workers: int):
        self.samples, self.buffer = samples, buffer
        self.memory = buffer.take((2, len(samples), *states.pairs.shape))
        arrays, lead, self.pairs = self.memory.numpy(), states.pairs.lead, states.pairs
        piece = max(LEAST, self.memory.nbytes // (4 * workers))
        self.reads: list[Future[None]] = []
        try:
            for i, sample in enumerate(samples):
                for half, ahead in ((0, 0), (1, lead)) if sample >= 0 else ():
                    self.reads += [pool.submit(read) for read in states.reads(sample, ahead, arrays[half, i], piece)]
        except CourseError as error:                 # a file that cannot be opened: raised when the batch's turn comes
            self.reads.append(Future())
            self.reads[-1].set_exception(error)

    def is_read(self) -> bool:
        """Whether all reads have finished without an error."""
        return all(read.done() and not read.exception() for read in self.reads)

    def wait(self) -> None:
        """Wait for all reads. Raises what a read raised, and `CourseError` for data that was never written."""
        for read in self.reads:
            read.result()
        arrays, real = self.memory.numpy(), [i for i, sample in enumerate(self.samples) if sample >= 0]
        for half, ahead in enumerate((0, self.pairs.lead)):
            states = arrays[half] if len(real) == len(self.samples) else arrays[half][real]
            self.pairs.check_states([(self.samples[i], ahead) for i in real], states)


class DeviceStage:
    """Brings batches to the device and normalizes them there, on a separate stream."""

    def __init__(self, pairs: Pairs, device: torch.device):
        self.device = device
        self.mean, self.std = (torch.from_numpy(value).to(device) for value in (pairs.mean, pairs.std))     # (C, 1, 1)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.handed: deque[torch.cuda.Event] = deque()

    def send(self, reading: BatchRead) -> Staged:
        """Start to copy a batch to the device and to normalize it; nothing here waits for the device."""
        reading.wait()
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            both = reading.memory.to(self.device, non_blocking=True)
            reading.buffer.copied = self._event()
            both.sub_(self.mean).div_(self.std)
            for i, sample in enumerate(reading.samples):
                if sample < 0:
                    both[:, i] = 0
            return {"input": both[0], "target": both[1], "sample": sample_ids(reading.samples, self.device)}, self._event()

    def hand_over(self, batch: Batch, ready: torch.cuda.Event | None) -> Batch:
        """The batch, for use on the stream on which the caller computes."""
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in batch.values():
                tensor.record_stream(stream)
            self.handed.append(torch.cuda.Event(blocking=True))
            self.handed[-1].record(stream)
            if len(self.handed) > 1:                 # else a host far ahead of its GPU would fill it with batches
                self.handed.popleft().synchronize()
        return batch

    def _event(self) -> torch.cuda.Event | None:
        """An event to wait for all that this stream has to do so far."""
        return self.stream.record_event() if self.stream else None
