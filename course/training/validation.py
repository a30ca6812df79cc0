"""Validation during training, and the forward pass for evaluation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from course.data import Batch, Pairs, eval_loader, has_validation, open_data
from course.data.weather import layout as files
from course.data.weather.metrics import latitude_weights, squared_error
from course.models import Model
from course.ops.number_formats import autocast
from course.parallel import Layout
from course.training.run_log import RunLog
from course.training.step import split_microbatches

if TYPE_CHECKING:
    from course.config import Config

PICTURED = "u10"                                     # the headline channel


def headline(channels: list[str]) -> str:
    """The channel that pictures and summary lines show."""
    return PICTURED if PICTURED in channels else channels[0]


def row_weights(pairs: Pairs, device: torch.device) -> Tensor:
    """The latitude weights of a data set's grid, (H,)."""
    return latitude_weights(torch.from_numpy(files.grid_latitudes(pairs.years[0])).float()).to(device)


def forward_only(model: Model, layout: Layout, precision: str,
                 loss_alone: bool = False) -> Callable[[Batch], tuple[Tensor | None, Batch]]:
    """A function batch -> (output, prepared batch), without gradients or dropout; the output is in float32 or float64.

    In a layout that cuts samples, both hold this rank's tokens; `layout.tokens.whole` assembles the output. In a pipeline the
    last stage has the output, the others None. loss_alone: the output is for `model.loss` only, so a model that computes its
    loss chunk by chunk need not have all of it.
    """
    @torch.no_grad()
    def forward(batch: Batch) -> tuple[Tensor | None, Batch]:
        device = batch["sample"].device
        with evaluating(model, loss_alone):
            batch = model.prepare(batch, torch.zeros((), dtype=torch.int64, device=device))
            batch = layout.tokens.cut(batch)
            with autocast(precision, device):
                if layout.pipeline is None:
                    output = model(batch)
                else:
                    output = layout.pipeline.infer(lambda chunk, _, x: layout.stages[chunk](batch, x), len(batch["sample"]))
        return (output if output is None else output.to(torch.promote_types(output.dtype, torch.float32))), batch

    return forward


@contextmanager
def evaluating(model: Model, loss_alone: bool) -> Iterator[None]:
    """Inside the block the model is in evaluation mode, and knows whether only the loss is wanted."""
    was_training = model.training
    model.eval()
    model.want_loss_alone(loss_alone)
    try:
        yield
    finally:
        model.train(was_training)
        model.want_loss_alone(False)


@dataclass(frozen=True)
class Validation:
    """One pass over the validation samples: the loss and, for weather, the RMSE per channel in its standard deviations."""

    config: "Config"
    layout: Layout
    pairs: Any                                       # a data set of `open_data`
    channels: list[str]                              # of weather; else empty
    weights: Tensor                                  # of the latitudes, (H,)

    @classmethod
    def of(cls, config: "Config", layout: Layout) -> "Validation | None":
        """The validation of a run; None with mock data, where there is nothing to forecast, or with data made with valid=0."""
        if not has_validation(config):
            if config.data.source == "files" and layout.mesh.world.rank == 0:
                print(f"{config.data.path} has no validation data: this run trains without validation", flush=True)
            return None
        pairs = open_data(config, "valid")
        if not isinstance(pairs, Pairs):
            return cls(config, layout, pairs, [], torch.empty(0))
        return cls(config, layout, pairs, files.channel_names(pairs.years[0]), row_weights(pairs, layout.mesh.world.device))

    def run(self, model: Model, report: RunLog, step: int) -> dict[str, Any]:
        """Return `valid_loss` over all samples and ranks; for weather also `valid_rmse`, with the first forecast's picture."""
        mesh = self.layout.mesh
        device = mesh.world.device
        one_of_many = mesh.first_along_all_but("dp", "pp")                                 # of ranks with the same samples
        forward = forward_only(model, self.layout, self.config.precision, loss_alone=not self.channels)
        sums = torch.zeros(2 + len(self.channels), dtype=torch.float64, device=device)     # loss, weight, squared errors
        for number, batch in enumerate(self._micro_batches()):
            output, ready = forward(batch)
            if number == 0 and self.channels:
                self._picture(model, batch, output, report, step)
            if output is None:
                continue
            loss, weight = model.loss(output, ready)
            sums[:2] += torch.stack([loss, weight]) * one_of_many
            if self.channels:
                output = model.fields(self.layout.tokens.whole(output))
                real = (batch["sample"] >= 0)[:, None]                                     # (B, 1)
                errors = squared_error(output, batch["target"], self.weights).where(real, 0)    # (B, C)
                sums[2:] += (errors.sqrt() if self._mean_of_roots else errors).sum(0) * one_of_many
        if mesh.all.size > 1:
            dist.all_reduce(sums, group=mesh.all.group)
        found: dict[str, Any] = {"valid_loss": (sums[0] / sums[1]).item()}
        if self.channels:
            means = sums[2:] / sums[1]
            ordered = dict(zip(self.channels, (means if self._mean_of_roots else means.sqrt()).tolist(), strict=True))
            found["valid_rmse"] = {self._name: ordered[self._name]} | ordered
        return found

    def _micro_batches(self) -> Iterator[Batch]:
        """This rank's samples, no more at a time than in a forward pass of training."""
        for batch in eval_loader(self.config, self.layout.mesh.dp, self.layout.mesh.world.device, self.pairs):
            yield from split_microbatches(batch, self.config.train.micro_batch)

    @property
    def _mean_of_roots(self) -> bool:
        return self.config.train.rmse == "mean_of_roots"

    @property
    def _name(self) -> str:
        return headline(self.channels)

    def _picture(self, model: Model, batch: Batch, output: Tensor | None, report: RunLog, step: int) -> None:
        """Add a picture of the first sample to the report; in a pipeline only the last stage has its forecast."""
        number, truth = self.channels.index(self._name), batch["target"][0]
        forecast = torch.empty_like(truth) if output is None else model.fields(self.layout.tokens.whole(output))[0].contiguous()
        pp = self.layout.mesh.pp
        if pp.size > 1:
            dist.broadcast(forecast, pp.ranks[-1], group=pp.group)
        if report.speaks:
            from course.utils import plots  # imports matplotlib, which the other ranks need not

            wanted, got = (x[number].cpu().numpy() for x in (truth, forecast))
            figure = plots.truth_forecast_error(wanted, got, f"{self._name} (standard deviations), next state")
            report.picture(f"forecast/{self._name}", figure, step)
