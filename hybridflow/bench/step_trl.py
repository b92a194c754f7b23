"""What TRL's trainers have in common as contestants of `bench step`.

Owns nothing of ours: what is set here is what a user of TRL would set, and the clocks around its methods. A trainer's
`train` runs in a thread of its own, which waits at the end of each step for the next call.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from transformers.utils import logging

from hybridflow.bench import step_case as case

STEPS = 1000  # so many are prepared


class Clock:
    """CPU seconds of this process by phase; one inside another counts for itself alone."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(case.PHASES, 0.0)
        self._open: list[str] = []
        self._since = time.process_time()

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a part of `phase`."""
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._mark()
            self._open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._mark()
                self._open.pop()
        return timed

    def take(self) -> case.Spent:
        """Since the last call; what is in no phase is the update's."""
        self._mark()
        spent, self._spent = self._spent, dict.fromkeys(case.PHASES, 0.0)
        return spent

    def _mark(self) -> None:
        now = time.process_time()
        self._spent[self._open[-1] if self._open else "update"] += now - self._since
        self._since = now


class Turns(TrainerCallback):
    """Lets a `train` do one step for each call of `step`."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failed = ""

    def start(self, train: Callable[[], object]) -> None:
        """Begin `train`, up to its first step."""
        def run() -> None:
            self._go.acquire()
            try:
                train()
                self._failed = "it has no more steps"
            except BaseException:
                self._failed = traceback.format_exc()
            self._done.release()
        threading.Thread(target=run, daemon=True).start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._done.release()
        self._go.acquire()

    def step(self) -> None:
        """One step. Raises RuntimeError where training has failed."""
        self._go.release()
        self._done.acquire()
        if self._failed:
            raise RuntimeError(self._failed)


class TrlTrainer:
    """One step after another on prompts of its own. A subclass makes `self.trainer`.

    Attributes:
        given: whether its responses are those of `case.responses`, and not sampled.
    """

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        assert precision == "fp32", precision
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        self.folder, self.clock, self.turns = Path(folder), Clock(), Turns()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder / case.TOKENIZER)
        self.given = False
        self.trainer = self.make()
        self.turns.start(self.trainer.train)

    def make(self) -> Any:
        """The trainer, with `self.turns` among its callbacks and `self.clock` around its methods."""
        raise NotImplementedError

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """All that is trained, by role and Hugging Face's name."""
        raise NotImplementedError

    def step(self, number: int) -> case.Spent:
        """A whole step."""
        self.clock.take()
        self.turns.step()
        return self.clock.take()

    def gradients(self, path: str) -> None:
        """Write those with which a step on given responses goes to the optimizer; it must be the first step."""
        def write(*_: object) -> None:
            save_file({name: weight.grad.contiguous() for name, weight in self.named_weights().items()}, path)

        hook = register_optimizer_step_pre_hook(write)
        self.given = True
        self.turns.step()
        self.given = False
        hook.remove()


def model_of(folder: Path) -> PreTrainedModel:
    """A language model, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def common_settings(folder: str) -> dict[str, Any]:
    """Of `TrainingArguments`, for both algorithms."""
    return dict(output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                per_device_train_batch_size=case.ROWS, gradient_accumulation_steps=1, optim="adamw_torch_fused",
                learning_rate=case.LR, lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=case.BETAS[0],
                adam_beta2=case.BETAS[1], adam_epsilon=case.EPS, logging_strategy="no", save_strategy="no",
                disable_tqdm=True)
