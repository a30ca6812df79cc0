"""What a rank sends: bytes of its messages, and which collectives it calls."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Within this context: `bytes` and `messages` that this rank sends, and `to` which ranks of a group, the names of the
    `collectives` that it calls, and what it brings to one that gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.messages = 0
        self.to: set[int] = set()
        self.collectives: list[str] = []
        self.gathered = 0                            # the most bytes that it brings to an all-gather

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                 # else the first operation imports torch._dynamo for a second and more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1]
            if name == "send":
                self.bytes += sum(tensor.nbytes for tensor in args[0])
                self.messages += 1
                self.to.add(args[2])
            elif not name.startswith("recv"):
                self.collectives.append(name)
            if "allgather" in name:
                brought = args[1] if isinstance(args[1], list | tuple) else [args[1]]
                self.gathered = max(self.gathered, sum(tensor.nbytes for tensor in brought))
        return func(*args, **(kwargs or {}))
