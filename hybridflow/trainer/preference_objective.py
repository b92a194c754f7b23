"""From the preference block of a config to the losses: config words become enums here. It computes nothing."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.dpo import DpoLoss
from hybridflow.algorithms.preference import BradleyTerryObjective, DpoObjective, KtoObjective
from hybridflow.config.schema import Config


def bradley_terry_objective(config: Config) -> BradleyTerryObjective:
    """That of `reward_model`."""
    return BradleyTerryObjective(config.preference.centre_coef)


def dpo_objective(config: Config) -> DpoObjective:
    """That of `dpo`."""
    preference = config.preference
    return DpoObjective(preference.beta, DpoLoss(preference.loss.value), preference.label_smoothing)


def kto_objective(config: Config, reference_point: Tensor) -> KtoObjective:
    """That of a step of `kto`."""
    preference = config.preference
    return KtoObjective(preference.beta, reference_point, preference.desirable_weight, preference.undesirable_weight)
