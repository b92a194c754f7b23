"""The generation engine of one model replica: prompts in, completions out.

Owns the order of things: which weights it generates under, what it is asked, and when memory is taken and given back.
Every rank of a replica calls `generate` with the same prompts. Weights are whatever the stage holds: putting them
there, and freeing them, is the caller's business. A step is a runner's, what is in it a scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridflow.generation.exchange import Exchange
from hybridflow.generation.limits import DEFAULT_LIMITS, GenerationLimits, ranks_of_host
from hybridflow.generation.records import Completion, OnEnd, Prompt, SamplingParams
from hybridflow.generation.runner import StageRunner
from hybridflow.generation.scheduler import Scheduler
from hybridflow.generation.session import Session
from hybridflow.generation.work_source import WorkSource
from hybridflow.models.config import ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import Mesh


class StaleWeightsError(RuntimeError):
    """The generation weights are not of the version that the caller expects."""


class Generator:
    """Samples from a decoder in any tensor and pipeline layout; replicas (the dp axis) share prompts out, no more.

    Attributes:
        weight_version: of the weights that it generates under; None while it sleeps.
        scheduler: kept from call to call, with the prefixes that its cache has; None before the first.
    """

    def __init__(self, stage: DecoderStage, mesh: Mesh, config: ModelConfig, runner: StageRunner,
                 limits: GenerationLimits = DEFAULT_LIMITS,
                 decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`mesh` is the generation mesh, `stage` what it has of the model on this rank, `runner` executes it.

        Args:
            decode: the text of token ids, for stop strings; None where there will be none.

        Raises:
            ValueError: the stage is sequence parallel.
        """
        if stage.sequence_parallel:
            raise ValueError("generation stage: sequence_parallel is on; a step has too few tokens to cut, turn it off")
        self.stage, self.runner = stage, runner
        self.weight_version: int | None = None
        self._mesh, self._config, self._limits, self._decode = mesh, config, limits, decode
        self.scheduler: Scheduler | None = None

    def wake(self, version: int = 0) -> None:
        """The stage holds the weights of `version`: prepare to generate under them."""
        self.runner.prepare()
        self.weight_version = version
        if self.scheduler is not None:
            self.scheduler.drop_cache()

    def sleep(self) -> None:
        """Give back all memory; the stage's weights may go."""
        self.runner.release()
        self.weight_version, self.scheduler = None, None

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int,
                 expected_version: int | None = None, *, source: WorkSource | None = None,
                 interrupt: Callable[[], bool] | None = None, ended: OnEnd | None = None) -> list[Completion]:
        """Complete this replica's prompts, in their order.

        Each completion depends on the weights, `params`, `seed` and its own `Prompt` only (rule 4 of the design), up
        to the rounding of the model's arithmetic.

        Args:
            prompts: any number, none included; several samples of one prompt that stand side by side share its prefill.
            expected_version: the version the weights must have; None does not check.
            source: hands prompts out while there is room, by their index; completions are of those that this replica
                took, in their order. `prompts` is then the list of all replicas. None: all are this replica's.
            interrupt: asked in every step whether to stop; the leading rank's answer holds for its replica. What is
                not finished then comes back as `INTERRUPTED`, and goes on as the `begun` of a prompt, under whatever
                weights there are by then.
            ended: called on every rank of the replica as soon as a response has ended, with the index of its prompt and
                its ids.

        Raises:
            StaleWeightsError: the weights have another version, or there are none.
            ValueError: a prompt is empty or too long for the model or the cache, or a stop id is not in the vocabulary.
            FloatingPointError: the model gave logits that are not numbers.
        """
        if self.weight_version is None or expected_version not in (None, self.weight_version):
            raise StaleWeightsError(f"generation expects weight version {expected_version}, but the stage holds "
                                    f"{self.weight_version}: load the weights of this version before generating")
        check_requests(prompts, params, self._config, self._decode is not None)
        with torch.inference_mode():
            scheduler = self._ready_scheduler()
            exchange = Exchange(self._mesh, params.draws_raw, self._config.hidden_size, self.stage.dtype)
            session = Session(self.runner, scheduler, exchange, prompts, params, seed,
                              self.weight_version, self._config.vocab_size, self._decode, source, ended)
            try:
                return session.run(interrupt)
            except BaseException:  # what was planned may never have been computed: the next call must not find it
                scheduler.stop()
                scheduler.drop_cache()
                raise

    def _ready_scheduler(self) -> Scheduler:
        """The scheduler and the pages; those of the calls before, with the prefixes they have cached, if there are."""
        if self.scheduler is None:
            longest, mesh = self._config.max_position_embeddings, self._mesh
            blocks = torch.tensor(self._limits.num_blocks(self.runner.block_bytes, longest, mesh.device,
                                                          ranks_of_host(mesh.world)))
            blocks = blocks.to(mesh.device)
            for group in (mesh.tp, mesh.pp):
                all_reduce(blocks, group, dist.ReduceOp.MIN)
            self.runner.allocate(int(blocks))
            self.scheduler = Scheduler(num_blocks=int(blocks), max_rows=self._limits.max_batch_rows,
                                        max_step_tokens=self._limits.max_step_tokens, num_groups=mesh.layout.pp,
                                        max_length=longest)
        return self.scheduler


def check_requests(prompts: Sequence[Prompt], params: SamplingParams, config: ModelConfig, has_text: bool) -> None:
    """
    Raises:
        ValueError: what cannot be generated, all faults at once.
    """
    room = config.max_position_embeddings - params.max_new_tokens
    faults = [f"stop id {stop} is not in the vocabulary of {config.vocab_size}"
              for stop in params.stop_ids if not 0 <= stop < config.vocab_size]
    if params.stop_strings and not has_text:
        faults.append(f"stop strings {list(params.stop_strings)} need a tokenizer, and this generator has none")
    for prompt in prompts:
        if not prompt.ids:
            faults.append(f"prompt id {prompt.id} is empty; it must have at least one token, such as the bos token")
        if len(prompt.ids) > room:
            faults.append(f"prompt id {prompt.id} has {len(prompt.ids)} tokens; with max_new_tokens "
                          f"{params.max_new_tokens} it may have {room} (max_position_embeddings "
                          f"{config.max_position_embeddings})")
        ids = prompt.ids if prompt.begun is None else prompt.ids + prompt.begun.response_ids
        faults += [f"prompt id {prompt.id} has token {token}, which is not in the vocabulary of {config.vocab_size}"
                   for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < config.vocab_size]
        if not (-2**63 <= prompt.id < 2**63 and 0 <= prompt.sample < 2**63):
            faults.append(f"prompt id {prompt.id}, sample {prompt.sample}: both must be numbers of 64 bits")
        begun = 0 if prompt.begun is None else len(prompt.begun.response_ids)
        if prompt.longest(params) <= begun:
            faults.append(f"prompt id {prompt.id}, sample {prompt.sample} may have {prompt.longest(params)} response "
                          f"tokens and has {begun}; at least one must be left, or it is not to be asked for")
    if faults:
        raise ValueError("generation: " + "; ".join(faults))
