"""What a config is read for. Owns the names of the commands and nothing else."""

from enum import Enum


class Command(Enum):
    """What a config is read for: each command needs other parts of it.

    TRAIN, SFT, DPO, KTO, REWARD_MODEL, GENERATE, EVALUATE and EXPORT are the commands of the command line. COMPLETE is
    GENERATE with a file of prompts of its own, and API is `init_trainer`, where the caller brings the prompts: there
    the data block is not read, but for the form of chats.
    """

    TRAIN = "train"
    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    REWARD_MODEL = "reward_model"
    GENERATE = "generate"
    COMPLETE = "generate --prompts"
    EVALUATE = "evaluate"
    EXPORT = "export"
    API = "api"

    @property
    def answers(self) -> bool:
        """Whether a trained model is asked for answers, and nothing is trained."""
        return self in (Command.GENERATE, Command.COMPLETE, Command.EVALUATE)

    @property
    def scores(self) -> bool:
        """Whether answers are given rewards, if only in evaluations."""
        return self is Command.EVALUATE or (self.trains and self is not Command.REWARD_MODEL)

    @property
    def asks_held_out(self) -> bool:
        """Whether held-out prompts are answered, and nothing is trained."""
        return self in (Command.GENERATE, Command.EVALUATE)

    @property
    def prefers(self) -> bool:
        """Whether it learns from preferences."""
        return self in (Command.DPO, Command.KTO, Command.REWARD_MODEL)

    @property
    def has_pairs(self) -> bool:
        """Whether an optimizer batch is made of pairs, the two rows of which stay together."""
        return self in (Command.DPO, Command.REWARD_MODEL)

    @property
    def is_offline(self) -> bool:
        """Whether it learns from given answers; held-out prompts may be answered in evaluations."""
        return self is Command.SFT or self.prefers

    @property
    def trains(self) -> bool:
        """Whether a model learns."""
        return self.is_offline or self in (Command.TRAIN, Command.API)

    @property
    def unit(self) -> str:
        """What micro-batches are counted in while a model learns."""
        return "pair" if self.has_pairs else "row"
