"""What a call brings: a step on the rows that the guide is about or on a batch of others, or rows to look at."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..program.data import NoRelation, Relation
from .known import KnownGuide


@dataclass(frozen=True)
class Call:
    """What a guide's call is for. By itself it is an evaluation on other rows than training's, with observations."""

    relation: Relation | type[NoRelation] = NoRelation  # what its tensors are to training's
    inputs: bool = True  # whether its inputs are training's: latents of single rows are of these rows
    same: ClassVar[bool] = False  # whether its rows are training's, with their observations, or q is about no rows
    learns: ClassVar[bool] = False  # whether gradients pass through the sites that q is given
    new: ClassVar[bool] = False  # whether its rows are to predict at, whatever they are

    def kept(self, value: Tensor) -> Tensor:
        """A value as it is kept for the call: where nothing is learned without its graph."""
        return value.detach()


class Evaluation(Call):
    """Training's rows; nothing is learned."""

    same = True


class BatchStep(Call):
    """A step on a batch of other rows than those that q is about."""

    learns = True

    def kept(self, value: Tensor) -> Tensor:
        return value


class TrainingStep(BatchStep, Evaluation):
    """A step on the rows that q is about; or any step, where it is about none, as that of SVGP."""


class NewRows(Call):
    """Rows to predict at."""

    new = True


# Of calls with observations, by whether they are of training's rows, and whether something is learned of them.
KINDS = {(kind.same, kind.learns): kind for kind in (TrainingStep, Evaluation, BatchStep, Call)}


def classify(guide: KnownGuide, args: tuple, kwargs: dict[str, object]) -> Call:
    """Which call it is that brings these arguments."""
    relation, steps = guide.relation(args, kwargs), torch.is_grad_enabled()
    # Its tensors are compared with those of training where something belongs to single rows, and no sooner.
    if guide.core.data is None or not guide.is_about_rows:
        return KINDS[steps or not guide.kind.is_of_rows, steps](relation)
    learns = steps and (relation.same or (guide.kind.takes_batches(guide) and not relation.fewer))
    return KINDS[relation.same, learns](relation, relation.inputs)
