"""A whole training step as one CUDA graph: captured once, then replayed.

A step of a small model is thousands of kernels of a few microseconds each, and the host takes longer to launch them than the
GPU to run them. A graph is the list of all these launches with their addresses, submitted at once. So everything that a replay
uses must stay at the address that it had during the capture:

    the batch           is copied into the tensors that were captured
    parameters, states  are updated in place; learning rate, step count and loss scale are tensors on the device
    results             are returned as copies: the next replay overwrites the originals
    Python              does not run at all: its decisions during the capture are final

Source: CUDA's programming guide on graphs, and PyTorch's notes on `torch.cuda.graph`.
"""

import torch
from torch import Tensor

from course.data import Batch
from course.parallel import Mesh
from course.parallel.data_parallel.gradients import GradientSync
from course.parallel.tensor_parallel import symmetric_memory
from course.training.step import Step
from course.utils.errors import CourseError

WARM = 3                                            # real steps before the capture: in them libraries choose algorithms, NCCL
                                                    # connects, and the optimizer makes its states


def graphed(step: Step, gradients: GradientSync, mesh: Mesh) -> Step:
    """The same step, replayed from a CUDA graph from its fourth call on. Raises `CourseError` without a GPU."""
    if mesh.world.device.type != "cuda":
        raise CourseError("graphs=true needs a GPU: set graphs=false")
    return GraphedStep(step, gradients, mesh.world.device)


class GraphedStep:
    """A step that is captured after some calls and replayed in all later ones."""

    def __init__(self, step: Step, gradients: GradientSync, device: torch.device):
        self.step, self.gradients, self.device = step, gradients, device
        self.stream = torch.cuda.Stream(device)     # the default stream cannot capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch = {}                      # what replays read
        self.results: tuple[Tensor, Tensor]         # what replays write

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls <= WARM:
            return self.warm(batch)
        if self.graph is None:
            self.capture(batch)
        self.fill(batch)
        assert self.graph is not None
        self.graph.replay()
        loss, norm = self.results
        return loss.clone(), norm.clone()

    def whole(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a step, and wait for its work on other streams (ZeRO's parameters): a graph must end complete."""
        results = self.step(batch)
        self.gradients.wait_parameters()
        return results

    def warm(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a step without a graph, on the stream of the later capture."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss, norm = self.whole(batch)
        current.wait_stream(self.stream)
        for tensor in batch.values():
            tensor.record_stream(self.stream)
        return loss.clone(), norm.clone()

    def capture(self, batch: Batch) -> None:
        """Record the launches of a step without running it. Other threads, such as NCCL's, may continue."""
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.stream.device.index]
        drawn = generator.get_state()
        torch.cuda.synchronize(self.device)
        symmetric_memory.new_graph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.results = self.whole(self.batch)
        except RuntimeError as error:
            # PyTorch's generator believes that the capture goes on, and would draw no more numbers
            fresh = torch.Generator(self.stream.device).set_state(drawn)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise CourseError(
                f"this step cannot be captured in a CUDA graph ({str(error).splitlines()[0]}): nothing in it may wait for the "
                "GPU (.item(), .cpu(), `if` on a tensor's value) or make a shape from a tensor's values. The traceback above "
                "shows the line; set graphs=false to train without") from error
        self.graph = graph

    def fill(self, batch: Batch) -> None:
        """Copy a batch to where replays read it."""
        for name in self.batch.keys() | batch.keys():
            old, new = (None if x is None else (tuple(x.shape), x.dtype) for x in (self.batch.get(name), batch.get(name)))
            if old != new:
                raise CourseError(f"the step was captured with `{name}` {told(old)}, and this batch has it {told(new)}: a graph "
                                  "can only be replayed on the shapes that it was captured with; keep train.global_batch and "
                                  "the data's shapes, or set graphs=false")
        for name, tensor in self.batch.items():
            tensor.copy_(batch[name], non_blocking=True)


def told(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    """A tensor's shape and format in words."""
    return "absent" if kind is None else f"of shape {kind[0]} in {str(kind[1]).removeprefix('torch.')}"
