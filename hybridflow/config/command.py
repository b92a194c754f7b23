"""What a config is read for. Owns the names of the commands and nothing else."""

from enum import Enum


class Command(Enum):
    """What a config is read for: each command needs other parts of it.

    TRAIN, SFT, GENERATE and EXPORT are the commands of the command line. API is `init_trainer`, where the caller brings
    the prompts, so that the data block is not read.
    """

    TRAIN = "train"
    SFT = "sft"
    GENERATE = "generate"
    EXPORT = "export"
    API = "api"
