"""The DALI loaders: NVIDIA's pipelines of operators, the same code with and without a GPU.

`loader` reads HDF5 in worker processes (a parallel external source); `numpy_loader` reads a variant of the layout, one .npy
file a state (`numpy_files.py`), with threads of DALI's own. A batch of B pairs is 2 B states to them: inputs, then targets.
They are normalised where the model is, by arithmetic operators: DALI's `normalize` multiplies by a reciprocal, whose bits
would differ from the other loaders'.
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

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)          # what asks a run to stop
SEGMENT = 1 << 14                                    # about so many files are given to one pipeline of `numpy_loader`


def loader(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Generator[Batch, None, None]:
    """The batches of the given sample ids, on the device; `workers` processes read them, `ahead` batches before their turn.

    The processes are spawned: forks of a process that has threads or uses CUDA are not to be relied on. What cannot be
    read raises `CourseError`, up to `ahead` batches early. Closing the generator ends the processes. One that is killed in a
    moment in which it holds the lock of DALI's queue leaves the trainer waiting: DALI sets no limit to that.
    """
    short_sockets()
    return run_pipeline(partial(hdf5_pipeline, pairs, ids, workers, ahead, device), ids(), device)


def hdf5_pipeline(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Any:
    """The pipeline of `loader`, its workers started."""
    pipe = pipeline(len(next(ids())), workers, ahead, device, py_num_workers=workers, py_start_method="spawn")
    from nvidia.dali import fn, types

    with pipe:
        states = fn.external_source(Source(pairs, ids), parallel=True, batch=False, dtype=types.DALIDataType.FLOAT, ndim=3,
                                    prefetch_queue_depth=ahead, bytes_per_sample_hint=4 * int(np.prod(pairs.shape)))
        pipe.set_outputs(normalised(states, pairs, device))
    with signals_blocked():  # workers inherit what is held back, and deal with it in `exit_with_trainer`
        pipe.build()
    return pipe


def numpy_loader(pairs: Pairs, ids: "Ids", workers: int, ahead: int, device: torch.device) -> Generator[Batch, None, None]:
    """As `loader`, from .npy files, which `workers` threads read; no processes.

    DALI's reader takes its files in the order in which it is given them, again and again; it cannot be told of more while it
    runs. So each pipeline is given the files of the next few hundred batches, and when it has read them another is built.
    """
    numpy_files.check(pairs)
    batches = ids()
    while segment := next_segment(batches):
        yield from run_pipeline(partial(numpy_pipeline, pairs, segment, workers, ahead, device), segment, device)


def numpy_pipeline(pairs: Pairs, segment: list[list[int]], workers: int, ahead: int, device: torch.device) -> Any:
    """The pipeline that `numpy_loader` reads these batches with."""
    pipe = pipeline(len(segment[0]), workers, ahead, device)
    from nvidia.dali import fn

    files = [numpy_files.state_file(pairs, max(sample, 0), later) for samples in segment
             for later in (0, pairs.lead) for sample in samples]
    with pipe:
        states = fn.readers.numpy(files=files, prefetch_queue_depth=ahead)
        pipe.set_outputs(normalised(states, pairs, device))
    return pipe


def next_segment(batches: Iterator[list[int]]) -> list[list[int]]:
    """The sample ids of as many batches as one pipeline is given; none at the end."""
    first = list(islice(batches, 1))
    return first + list(islice(batches, SEGMENT // (2 * len(first[0])))) if first else []


def pipeline(pairs: int, threads: int, ahead: int, device: torch.device, **more: Any) -> Any:
    """An empty pipeline for batches of so many pairs."""
    try:
        from nvidia.dali import Pipeline
    except ImportError as error:
        raise CourseError('data.loader=dali needs nvidia-dali: pip install "course[dali]"') from error
    return Pipeline(batch_size=2 * pairs, num_threads=threads, device_id=(device.index or 0) if device.type == "cuda" else None,
                    prefetch_queue_depth=ahead, **more)


def normalised(states: Any, pairs: Pairs, device: torch.device) -> Any:
    """In a pipeline: the states on the device, minus the mean, divided by the standard deviation."""
    from nvidia.dali import types

    place = "gpu" if device.type == "cuda" else "cpu"
    mean, std = (types.Constant(value, device=place) for value in (pairs.mean, pairs.std))
    return ((states.gpu() if place == "gpu" else states) - mean) / std


def run_pipeline(build: Callable[[], Any], batches: Iterable[list[int]], device: torch.device) -> Generator[Batch, None, None]:
    """The batches of a new pipeline, whose sample ids these are; each in memory that DALI gives away with it."""
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
        del pipe                                     # the last to hold it, also where this frame is kept by a traceback: its
                                                     # processes end now


def states_of(pipe: Any, device: torch.device) -> Tensor:
    """What the pipeline has ready, for the stream that the caller computes on."""
    try:
        return torch.from_dlpack(pipe.run(torch.cuda.current_stream(device) if device.type == "cuda" else None)[0].as_tensor())
    except Exception as error:
        wrong = error_message(error)
        if not wrong:
            raise
    finally:
        del pipe
    raise CourseError(wrong)                         # here, with no other error as its context, which would keep the pipeline


def error_message(error: Exception) -> str:
    """What a user can mend, in DALI's account of an error; nothing if there is no such thing in it."""
    text = str(error)
    _, mark, told = text.rpartition("course.utils.errors.CourseError: ")       # the end of a worker's traceback
    if mark:
        return told.strip()
    if "receiving interrupted" in text:
        return "a worker process of DALI was killed, perhaps for want of memory: run again, with fewer data.workers"
    return numpy_files.error_message(text)


class Source:
    """What a worker process runs: it reads the states that DALI asks for by number (which batch, which of it).

    Each worker begins the sample ids itself and follows them: which sample is when is for `order` alone to say.
    """

    def __init__(self, pairs: Pairs, ids: "Ids"):
        self.pairs, self.ids = pairs, ids
        self.batches: Iterator[list[int]] | None = None
        self.number, self.samples = -1, list[int]()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled, so at home in a worker."""
        vars(self).update(state)
        threading.Thread(target=exit_with_trainer, args=[os.getppid()], daemon=True).start()

    def __call__(self, asked: Any) -> np.ndarray:
        """One state, not normalised; `asked` is DALI's SampleInfo."""
        if self.batches is None:
            self.batches, self.states = self.ids(), StateReader(self.pairs)
        while self.number < asked.iteration:         # its StopIteration tells DALI of the end
            self.samples = next(self.batches)
            self.number += 1
        target, i = divmod(asked.idx_in_batch, len(self.samples))
        return self.states.read(max(self.samples[i], 0), target * self.pairs.lead)   # padding: any state, made zero later


def exit_with_trainer(trainer: int) -> None:
    """End this process when the trainer asks for it, and within a second if it is gone.

    Other signals are for the trainer: a batch system sends them to every process of a job, and workers must live until
    the run is saved.
    """
    while os.getppid() == trainer:
        heard = signal.sigtimedwait(STOPS, 1.0)
        if heard and heard.si_signo == signal.SIGTERM and heard.si_pid == trainer:
            break
    os._exit(0)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Inside the block signals wait; processes that are started there never get them, but may ask for them."""
    resource_tracker.ensure_running()                # it would let signals through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
