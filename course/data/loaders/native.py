"""The native loader: PyTorch's DataLoader over HDF5 or token files; the baseline for the other loaders."""

import signal
from collections.abc import Generator, Iterable
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from course.data.hdf5_storage import first_line
from course.data.weather.pairs import Batch
from course.utils.atomic_files import os_error_cure
from course.utils.errors import CourseError
from course.utils.machine import cores, short_sockets


def loader(pairs: Dataset[Batch], batches: Iterable[list[int]], workers: int, pin: bool) -> Generator[Batch, None, None]:
    """The batches of the given sample ids, read ahead by worker processes, at most one for each core."""
    if workers:
        short_sockets()
    iterator = iter(DataLoader(pairs, batch_sampler=batches, num_workers=min(workers, cores()), pin_memory=pin,
                               collate_fn=_into_shared_memory, worker_init_fn=_begin_worker))
    try:
        yield from iterator
    except (RuntimeError, OSError, EOFError) as error:
        if told := _worker_failure(error):
            raise CourseError(told) from error
        raise
    finally:                                         # end the workers now, not when an error's traceback lets go of them
        getattr(iterator, "_shutdown_workers", lambda: None)()


def _worker_failure(error: Exception) -> str:
    """An error message with a cure, if a worker process failed or could not hand over a batch; otherwise ""."""
    text = str(error)
    if isinstance(error, OSError | EOFError) or "Too many open files" in text:
        return f"the loader's workers could not hand over a batch ({first_line(error)}): {os_error_cure(error, MEMORY)}"
    if "DataLoader worker (pid" not in text:         # an exception that the worker raised: pass it on
        return ""
    if "Bus error" in text:
        return (f"a worker process of the loader ended ({first_line(error)}): shared memory (/dev/shm) is full, or a data file "
                f"was cut off: {MEMORY}")
    return (f"a worker process of the loader ended ({first_line(error)}), perhaps for want of memory: run again, with fewer "
            "data.workers")


MEMORY = "make room there (in a container --shm-size=8g), or run with fewer data.workers, a smaller batch, or data.loader=threads"


def _begin_worker(worker: int) -> None:
    """Set up a worker: ignore the first SIGTERM, and report errors of the thread that hands over batches.

    A batch system sends SIGTERM to every process of a job, but workers must live until the run is saved. The second SIGTERM
    ends them: a trainer that exits with workers left terminates them twice. By default, an error in the hand-over thread only
    prints a traceback, and the trainer waits forever for that batch.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    Queue._on_queue_feeder_error = _pass_on          # type: ignore[attr-defined]  # Python provides it for overriding


def _pass_on(queue: Any, error: Exception, message: Any) -> None:
    """Hand over the reason in place of a batch that could not be handed over."""
    cure = "set TMPDIR to a folder of a shorter name" if "AF_UNIX" in str(error) else os_error_cure(error, MEMORY)
    told = CourseError(f"a worker process of the loader could not hand over a batch ({first_line(error)}): {cure}")
    queue.put((message[0], ExceptionWrapper((CourseError, told, None), "in a worker's hand-over")))


def _into_shared_memory(batch: Any) -> Any:
    """Move a worker's batch to shared memory now, so that a full /dev/shm raises here and not in the hand-over thread."""
    if get_worker_info() is None:
        return batch
    try:
        return {name: tensor.share_memory_() for name, tensor in batch.items()}
    except (RuntimeError, OSError) as error:
        raise CourseError(f"a worker process of the loader has no shared memory for a batch ({first_line(error)}): "
                          f"{MEMORY}") from error
