"""What a config is read for. Owns the names of the commands and nothing else."""

from enum import Enum


class Command(Enum):
    """What a config is read for: each command needs other parts of it.

    TRAIN, SFT, GENERATE, EVALUATE and EXPORT are the commands of the command line. COMPLETE is GENERATE with a file of
    prompts of its own, and API is `init_trainer`, where the caller brings the prompts: there the data block is
    not read, but for the form of chats.
    """

    TRAIN = "train"
    SFT = "sft"
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
        """Whether answers are given rewards."""
        return self in (Command.TRAIN, Command.API, Command.SFT, Command.EVALUATE)

    @property
    def asks_held_out(self) -> bool:
        """Whether held-out prompts are answered, and nothing is trained."""
        return self in (Command.GENERATE, Command.EVALUATE)
