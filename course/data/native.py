"""The native loader: PyTorch's DataLoader over HDF5 or token files. Simple and honest, the baseline of the others."""

import signal
from collections.abc import Generator, Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset

from course.data.pairs import Batch
from course.errors import CourseError
from course.machine import cores


def loader(pairs: Dataset[Batch], batches: Iterable[list[int]], workers: int, pin: bool) -> Generator[Batch, None, None]:
    """The batches of the given sample ids, read ahead by worker processes: no more than there are cores to run on."""
    iterator = iter(DataLoader(pairs, batch_sampler=batches, num_workers=min(workers, cores()), pin_memory=pin,
                               collate_fn=_as_it_is, worker_init_fn=_leave_signals_to_the_trainer))
    try:
        yield from iterator
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):                 # one of the worker's own, which is passed on
            raise
        raise CourseError(f"a worker process of the loader ended ({str(error).splitlines()[0]}), perhaps for want of memory: run "
                          "again, with fewer data.workers") from error
    finally:                                         # end the workers now, not when an error's traceback lets go of them
        getattr(iterator, "_shutdown_workers", lambda: None)()


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A batch system sends SIGTERM to every process of a job: workers must live until the run is saved.

    They heed the second: a trainer that ends with workers left over terminates them twice.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def _as_it_is(batch: Any) -> Any:
    return batch
