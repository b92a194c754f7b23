"""What the ranks of a replica tell each other in a turn of generation.

Owns what is in a message and when it is there. Who computes what follows from the mesh: the last stage has the logits,
and its tensor rank 0, the leader, samples, asks for prompts and is asked to stop. How messages pass from stage to stage
is `pipeline`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.generation.intake import MOST_PROMPTS
from hybridflow.generation.pipeline import StageLinks
from hybridflow.generation.sampling import Choice
from hybridflow.parallel.mesh import Mesh

NOTHING_LEFT = -1


@dataclass(frozen=True)
class News:
    """What the leader says beside its choice.

    Attributes:
        stop: it was asked to stop.
        taken: indices of prompts that the replica starts; [] if it asked for prompts and none is left; None if it did
            not ask.
    """

    stop: bool = False
    taken: list[int] | None = None


@dataclass(frozen=True)
class Chosen:
    """Choices on the host: int64 tokens and log-probs `[samples]`, and the leader's news.

    `processed` is None where every token was drawn from the raw distribution.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    processed: np.ndarray | None
    news: News


class Choices(Protocol):
    """What was sampled in a turn, on its way to this rank's device and host.

    Attributes:
        tokens: int64 `[samples]`, on the device; to be asked for before the next turn of the group.
    """

    @property
    def tokens(self) -> Tensor: ...

    def on_host(self) -> Chosen:
        """Waits until the host has them."""


@dataclass(frozen=True)
class OwnChoices:
    """Those of a leader that is alone, on a CPU: they are where they have to be."""

    choice: Choice
    processed: Tensor | None
    news: News

    @property
    def tokens(self) -> Tensor:
        return self.choice.tokens

    def on_host(self) -> Chosen:
        processed = None if self.processed is None else self.processed.numpy()
        return Chosen(self.choice.tokens.numpy(), self.choice.log_probs.numpy(), processed, self.news)


class ToldChoices:
    """Those of a leader that tells them."""

    def __init__(self, mail: Tensor, columns: int, samples: int, coming: dist.Work | None = None) -> None:
        """
        Args:
            mail: float64: `columns` times `samples` numbers (tokens, raw and maybe processed log-probs), whether to
                stop, and, while there may be more prompts, how many were taken and which.
            coming: fills `mail`; None if it is there.
        """
        self._mail, self._columns, self._samples, self._coming = mail, columns, samples, coming
        self._copied: torch.cuda.Event | None = None
        self._host: Tensor | None = None
        if coming is None:
            self._start_copy()

    @property
    def tokens(self) -> Tensor:
        self._wait()
        return self._mail[: self._samples].long()

    def on_host(self) -> Chosen:
        self._wait()
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        numbers, size = self._host.numpy(), self._columns * self._samples
        tokens, log_probs, *processed = numbers[:size].reshape(self._columns, self._samples)
        stop, *told = numbers[size:].tolist()
        return Chosen(tokens.astype(np.int64), log_probs, processed[0] if processed else None,
                      News(bool(stop), _taken(told)))

    def _wait(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            self._start_copy()

    def _start_copy(self) -> None:
        self._host = self._mail
        if self._mail.is_cuda:
            self._host = torch.empty(self._mail.shape, dtype=self._mail.dtype, pin_memory=True)
            self._host.copy_(self._mail, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()


def _processed(choice: Choice) -> Tensor:
    return choice.log_probs if choice.processed is None else choice.processed


def _taken(told: list[float]) -> list[int] | None:
    """Of `[count, index, index, ...]`, or of nothing where no prompts can come."""
    if not told or told[0] == 0:
        return None
    return [] if told[0] == NOTHING_LEFT else [int(index) for index in told[1 : int(told[0]) + 1]]


class Exchange:
    """The messages of one rank.

    Attributes:
        num_groups: of sequences that take turns, one for each stage.
        lag: turns that the host may be behind the device, so that it never waits for the one under way.
    """

    def __init__(self, mesh: Mesh, draws_raw: bool, hidden_size: int, dtype: torch.dtype) -> None:
        """
        Args:
            draws_raw: processed log-probs never differ from raw ones, and are not sent.
            hidden_size, dtype: of hidden states.
        """
        self._tp, self.device = mesh.tp, mesh.device
        self._columns = 2 if draws_raw else 3
        self._links = StageLinks(mesh, hidden_size, dtype) if mesh.pp.size > 1 else None
        self._is_alone = mesh.model.size == 1 and mesh.device.type == "cpu"
        self.num_groups = mesh.pp.size
        self.lag = 0 if mesh.device.type == "cpu" else 1
        self.is_first = mesh.pp.index == 0
        self.is_last = mesh.pp.index == mesh.pp.size - 1
        self.leads_sampling = self.is_last and mesh.tp.index == 0

    def receive_hidden(self, tokens: int) -> Tensor | None:
        """`[tokens, hidden]` of the stage before; None on the first."""
        return None if self._links is None else self._links.receive_hidden(tokens)

    def send_hidden(self, hidden: Tensor) -> None:
        """Hand `[tokens, hidden]` on to the next stage; not on the last."""
        assert self._links is not None
        self._links.send_hidden(hidden)

    def share(self, choice: Choice | None, samples: int, news: News, more: bool) -> Choices:
        """The leader's choice and news on every rank of the replica; `choice` and `news` of others do not count.

        The logits are the same on every tensor rank, but what follows need not be bit for bit: running sums on CUDA are
        not deterministic, and one differing token would part the ranks' caches for good. It costs one small message a
        step beside the two all-reduces of every layer, and saves the other ranks the sampling.

        Args:
            samples: of the turn, on every rank.
            more: whether prompts may still come, on every rank.
        """
        if self._is_alone:
            if choice is None:
                choice = Choice(torch.empty(0, dtype=torch.int64), torch.empty(0), None)
            return OwnChoices(choice, None if self._columns == 2 else _processed(choice), news)
        told = 1 + MOST_PROMPTS if more else 0
        # fp64 holds every token id and every log-prob exactly
        mail = torch.empty(self._columns * samples + 1 + told, dtype=torch.float64, device=self.device)
        if self.leads_sampling:
            self._write(mail, choice, samples, news)
        coming = None
        if self._links is not None and self.leads_sampling:
            self._links.tell(mail)
        elif self._links is not None:
            coming = self._links.hear(mail)
        elif self._tp.size > 1:
            dist.broadcast(mail, self._tp.ranks[0], group=self._tp.process_group)
        return ToldChoices(mail, self._columns, samples, coming)

    def finish(self) -> None:
        """Wait until the others have what was sent. All choices have been asked for before."""
        if self._links is not None:
            self._links.finish()

    def _write(self, mail: Tensor, choice: Choice | None, samples: int, news: News) -> None:
        if choice is not None:
            table = mail[: self._columns * samples].view(self._columns, samples)
            table[0], table[1] = choice.tokens, choice.log_probs
            if self._columns == 3:
                table[2] = _processed(choice)
        rest = mail[self._columns * samples :]
        if len(rest) == 1:
            rest[0] = news.stop
            return
        told = [float(news.stop), 0.0 if news.taken is None else len(news.taken) or NOTHING_LEFT, *(news.taken or ())]
        rest[: len(told)] = torch.tensor(told, dtype=torch.float64)
