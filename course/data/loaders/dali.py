"""The DALI loaders: NVIDIA's operator pipelines, with the same code on CPU and GPU.

`loader` reads HDF5 in worker processes (a parallel external source). `numpy_loader` reads one .npy file per state
(`numpy_files.py`) with DALI's own threads. To DALI, a batch of B pairs is 2 B states: inputs, then targets. Arithmetic
operators normalize them on the model's device. DALI's `normalize` multiplies by a reciprocal, so its bits would differ from
the other loaders'.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from course.data.loaders import numpy_files
from course.data.loaders.hdf5_extents import StateReader
from course.data.weather.pairs import Batch, Pairs, sample_ids
from course.utils.errors import CourseError
from course.utils.machine import short_sockets

if TYPE_CHECKING:
    from course.data import Ids

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)          # signals that ask a run to stop
SEGMENT = 1 << 14                                    # about how many files one pipeline of `numpy_loader` reads


def loader(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches of the given sample ids on the device; `workers` processes read up to `ahead` batches in advance.

    The processes are spawned: forking a process that has threads or uses CUDA is unsafe. Unreadable data raises `CourseError`,
    up to `ahead` batches early. Closing the generator ends the processes. If a worker is killed while it holds the lock of
    DALI's queue, the trainer waits forever: DALI has no timeout there.
    """
    short_sockets()
    return run_pipeline(partial(hdf5_pipeline, pairs, ids, workers, ahead, device), ids(), device)


def hdf5_pipeline(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Any:
    """The pipeline for `loader`, with its workers running."""
    pipe = pipeline(len(next(ids())), workers, ahead, device, py_num_workers=workers, py_start_method="spawn")
    from nvidia.dali import fn, types

    with pipe:
        states = fn.external_source(Source(pairs, ids), parallel=True, batch=False, dtype=types.DALIDataType.FLOAT, ndim=3,
                                    prefetch_queue_depth=ahead, bytes_per_sample_hint=4 * int(np.prod(pairs.shape)))
        pipe.set_outputs(normalized(states, pairs, device))
    with signals_blocked():  # workers inherit the blocked signals, and handle them in `exit_with_trainer`
        pipe.build()
    return pipe


def numpy_loader(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Generator[Batch, None, None]:
    """Like `loader`, but `workers` threads read .npy files, without processes.

    DALI's reader cycles through a fixed list of files. So each pipeline gets the files of the next batches, about `SEGMENT`
    files in all. When it has read them, a new pipeline is built.
    """
    numpy_files.check(pairs)
    batches = ids()
    while segment := next_segment(batches):
        yield from run_pipeline(partial(numpy_pipeline, pairs, segment, workers, ahead, device), segment, device)


def numpy_pipeline(pairs: Pairs, segment: list[list[int]], workers: int, ahead: int, device: torch.device) -> Any:
    """Build the pipeline that reads one segment of batches for `numpy_loader`."""
    pipe = pipeline(len(segment[0]), workers, ahead, device)
    from nvidia.dali import fn

    files = [numpy_files.state_file(pairs, max(sample, 0), later) for samples in segment
             for later in (0, pairs.lead) for sample in samples]
    with pipe:
        states = fn.readers.numpy(files=files, prefetch_queue_depth=ahead)
        pipe.set_outputs(normalized(states, pairs, device))
    return pipe


def next_segment(batches: Iterator[list[int]]) -> list[list[int]]:
    """The sample ids of the batches for one pipeline; empty at the end."""
    first = list(islice(batches, 1))
    return first + list(islice(batches, SEGMENT // (2 * len(first[0])))) if first else []


def pipeline(pairs: int, threads: int, ahead: int, device: torch.device, **more: Any) -> Any:
    """An empty DALI pipeline for batches of `pairs` pairs. Raises `CourseError` if DALI is not installed."""
    try:
        from nvidia.dali import Pipeline
    except ImportError as error:
        raise CourseError('data.loader=dali needs nvidia-dali: pip install "course[dali]"') from error
    return Pipeline(batch_size=2 * pairs, num_threads=threads, device_id=(device.index or 0) if device.type == "cuda" else None,
                    prefetch_queue_depth=ahead, **more)


def normalized(states: Any, pairs: Pairs, device: torch.device) -> Any:
    """Inside a pipeline definition: move the states to the device, subtract the mean, divide by the standard deviation."""
    from nvidia.dali import types

    place = "gpu" if device.type == "cuda" else "cpu"
    mean, std = (types.Constant(value, device=place) for value in (pairs.mean, pairs.std))
    return ((states.gpu() if place == "gpu" else states) - mean) / std


def run_pipeline(build: Callable[[], Any], batches: Iterable[list[int]], device: torch.device) -> Generator[Batch, None, None]:
    """Build a pipeline and yield its batches, which have the given sample ids. Each batch owns its memory."""
    pipe = build()
    try:
        for samples in batches:
            both = states_of(pipe, device)           # (2 B, C, H, W)
            half = len(samples)
            for i, sample in enumerate(samples):
                if sample < 0:
                    both[[i, half + i]] = 0
            yield {"input": both[:half], "target": both[half:], "sample": sample_ids(samples, device)}
    finally:
        del pipe                                     # the last reference, even if a traceback keeps this frame: its
                                                     # processes end now


def states_of(pipe: Any, device: torch.device) -> Tensor:
    """The pipeline's next states, ready on the caller's current stream. Raises `CourseError` with a cure where one is known."""
    try:
        return torch.from_dlpack(pipe.run(torch.cuda.current_stream(device) if device.type == "cuda" else None)[0].as_tensor())
    except Exception as error:
        wrong = error_message(error)
        if not wrong:
            raise
    finally:
        del pipe
    raise CourseError(wrong)                         # outside `except`: a chained error would keep the pipeline alive


def error_message(error: Exception) -> str:
    """The part of a DALI error message that a user can act on; "" if there is none."""
    text = str(error)
    _, mark, told = text.rpartition("course.utils.errors.CourseError: ")       # the end of a worker's traceback
    if mark:
        return told.strip()
    if "receiving interrupted" in text:
        return "a worker process of DALI was killed, perhaps for want of memory: run again, with fewer data.workers"
    return numpy_files.error_message(text)


class Source:
    """The external source in a worker process: reads the state that DALI requests by batch number and index in the batch.

    Each worker iterates over the sample ids itself, so `order` alone determines them.
    """

    def __init__(self, pairs: Pairs, ids: "Ids"):
        self.pairs, self.ids = pairs, ids
        self.batches: Iterator[list[int]] | None = None
        self.number, self.samples = -1, list[int]()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start the watcher thread: unpickling happens in a worker."""
        vars(self).update(state)
        threading.Thread(target=exit_with_trainer, args=[os.getppid()], daemon=True).start()

    def __call__(self, asked: Any) -> np.ndarray:
        """Read one state, not normalized; `asked` is DALI's SampleInfo."""
        if self.batches is None:
            self.batches, self.states = self.ids(), StateReader(self.pairs)
        while self.number < asked.iteration:         # StopIteration tells DALI that the data ends
            self.samples = next(self.batches)
            self.number += 1
        target, i = divmod(asked.idx_in_batch, len(self.samples))
        return self.states.read(max(self.samples[i], 0), target * self.pairs.lead)   # padding: any state, zeroed later


def exit_with_trainer(trainer: int) -> None:
    """End this process when the trainer sends SIGTERM, and within a second after the trainer exits.

    Signals from others are ignored: a batch system sends them to every process of a job, but workers must live until the run
    is saved.
    """
    while os.getppid() == trainer:
        heard = signal.sigtimedwait(STOPS, 1.0)
        if heard and heard.si_signo == signal.SIGTERM and heard.si_pid == trainer:
            break
    os._exit(0)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the stop signals inside the block. Processes started there inherit the mask and can only poll for the signals."""
    resource_tracker.ensure_running()                # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
