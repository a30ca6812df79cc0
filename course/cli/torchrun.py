"""Under torchrun, say an error of all ranks once, and without torchrun's own traceback after it."""

import hashlib
import os
import sys
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

SAID = 78                                            # EX_CONFIG: a rank has said in a sentence why it ends


def exit_with(sentence: str) -> NoReturn:
    """End this rank with status SAID after printing the sentence, unless another rank of the same attempt has printed it."""
    if is_first(sentence):
        print(f"course: {sentence}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(SAID)                                   # an orderly end could wait for ranks that have ended


def is_first(sentence: str) -> bool:
    """Whether no other rank has asked this before; True if torchrun's store does not answer."""
    from torch.distributed import TCPStore

    key = f"course/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{hashlib.sha256(sentence.encode()).hexdigest()}"
    with suppress(RuntimeError, ValueError, KeyError):
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
                         timeout=timedelta(seconds=2))
        return store.add(key, 1) == 1
    return True


def quiet() -> Any:
    """Let this torchrun end without a traceback if every failed rank has said its error in a sentence.

    torchrun calls it when it starts, as it does for each entry point in `torchrun.handlers`, its place for extensions. It
    returns a rendezvous of that name, torchrun's own.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failures = getattr(error, "failures", None) if kind.__name__ == "ChildFailedError" else None
        if not failures or any(failure.exitcode != SAID for failure in failures.values()):
            before(kind, error, trace)

    sys.excepthook = hook
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    return rendezvous_handler_registry.create_handler
