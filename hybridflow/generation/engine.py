"""The generation engine of one model replica: prompts in, completions out.

Owns the loop of prefills and decode steps. Every tensor-parallel rank of a replica calls `generate` with the same
prompts; replicas (the dp axis) never talk to each other. Weights are whatever the stage holds: putting them there,
and freeing them, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.generation.admission import Limits, SharedPrompt, admit, cheapest_merge, similar_lengths, waiting_order
from hybridflow.generation.attend import DecodeAttend, PrefillAttend
from hybridflow.generation.kv_cache import CacheShape, RowGroup
from hybridflow.generation.random import stream_keys, uniforms
from hybridflow.generation.records import Completion, FinishReason, Prompt, SamplingParams
from hybridflow.generation.row_table import RowTable
from hybridflow.generation.sampling import sample_tokens
from hybridflow.models.config import ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import split_heads
from hybridflow.parallel.mesh import AxisGroup, Mesh

MOST_GROUPS = 8  # attention calls a layer


class StaleWeightsError(RuntimeError):
    """The generation weights are not of the version that the caller expects."""


@dataclass(frozen=True)
class GenerationLimits:
    """Bounds on what is at work at once: memory and speed, never a token. They are fixed numbers and not what happens
    to be free, so that a run with the same seed forms the same batches.

    Attributes:
        max_batch_rows: rows that decode together.
        max_cache_bytes: of one rank. Fewer rows decode together where full rows of the longest prompt would need more;
            one row is always taken.
        max_prefill_tokens: prompt tokens of one prefill; one longer prompt is still taken, alone.

    Raises:
        ValueError: a limit is below 1.
    """

    max_batch_rows: int = 256
    max_cache_bytes: int = 4 << 30
    max_prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        faults = [f"{name} is {value}; it must be at least 1" for name, value in vars(self).items() if value < 1]
        if faults:
            raise ValueError("generation: " + "; ".join(faults))


DEFAULT_LIMITS = GenerationLimits()


class Generator:
    """Samples from a decoder that is whole on each replica: any tp, pp 1, dp what is left.

    Attributes:
        weight_version: set by whoever loads weights into the stage; None until then.
    """

    def __init__(self, stage: DecoderStage, mesh: Mesh, config: ModelConfig,
                 limits: GenerationLimits = DEFAULT_LIMITS) -> None:
        """`stage` is the whole model (pp 1), not sequence parallel; `mesh` is the generation mesh.

        Raises:
            ValueError: the mesh has pipeline stages, or the stage is sequence parallel.
        """
        if mesh.layout.pp != 1:
            raise ValueError(f"generation layout {mesh.layout}: pp is {mesh.layout.pp}; it must be 1")
        if stage.sequence_parallel:
            raise ValueError("generation stage: sequence_parallel is on; a step has too few tokens to cut, turn it off")
        self.stage = stage
        self.weight_version: int | None = None
        self._mesh = mesh
        self._config = config
        self._limits = limits

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int,
                 expected_version: int | None = None) -> list[Completion]:
        """Complete this replica's prompts, in their order.

        Each completion depends on the weights, `params`, `seed` and its own `Prompt` only (rule 4 of the design), up
        to the rounding of the model's arithmetic.

        Args:
            prompts: any number, none included; several samples of one prompt share its prefill.
            expected_version: the version the weights must have; None does not check.

        Raises:
            StaleWeightsError: the weights have another version.
            ValueError: a prompt is empty or too long for the model, or a stop id is not in the vocabulary.
            FloatingPointError: the model gave logits that are not numbers.
        """
        if expected_version is not None and expected_version != self.weight_version:
            raise StaleWeightsError(f"generation expects weight version {expected_version}, but the stage holds "
                                    f"{self.weight_version}: load the weights of this version before generating")
        _check_requests(prompts, params, self._config)
        shape = self._cache_shape()
        longest = max((len(prompt.ids) for prompt in prompts), default=0) + params.max_new_tokens
        rows = max(1, self._limits.max_cache_bytes // (longest * shape.bytes_per_token))
        limits = Limits(min(self._limits.max_batch_rows, rows), self._limits.max_prefill_tokens)
        with torch.inference_mode():
            return _Rollout(self.stage, self._mesh.tp, shape, prompts, params, seed, limits).run()

    def _cache_shape(self) -> CacheShape:
        config = self._config
        heads = split_heads(config, self._mesh.tp.size, self._mesh.tp.index)
        return CacheShape(config.num_layers, heads.num_kv, config.head_dim, self.stage.dtype, self._mesh.device)


class _Rollout:
    """One `generate` call: what waits, what runs, and what has been sampled so far."""

    def __init__(self, stage: DecoderStage, tp: AxisGroup, shape: CacheShape, prompts: Sequence[Prompt],
                 params: SamplingParams, seed: int, limits: Limits) -> None:
        self.stage, self.tp, self.shape = stage, tp, shape
        self.prompts, self.params, self.limits = prompts, params, limits
        self.waiting = waiting_order(prompts)
        self.groups: list[RowGroup] = []
        self.table = RowTable.empty(shape.device)
        self.sampled: list[tuple[Tensor, Tensor, Tensor]] = []  # requests, tokens, log-probs; [rows] of each step
        self.stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=shape.device)
        ids = torch.tensor([[p.id, p.sample] for p in prompts], dtype=torch.int64, device=shape.device).view(-1, 2)
        self.keys = stream_keys(seed, ids[:, 0], ids[:, 1])  # [requests]

    def run(self) -> list[Completion]:
        while self.waiting or self.groups:
            cohort = admit(self.waiting, self.prompts, len(self.table), self.limits)
            if cohort:
                self.prefill(cohort)
            else:
                self.decode()
        return self.completions()

    def prefill(self, cohort: list[SharedPrompt]) -> None:
        """Run the prompts of `cohort`, the first waiting ones, and sample the first token of each of their rows."""
        runs = similar_lengths(cohort)
        groups = [RowGroup.of_prompts([len(p.ids) for p in run], [len(p.requests) for p in run],
                                      self.params.max_new_tokens, self.shape) for run in runs]
        attend = PrefillAttend(groups, runs, self.shape.device)
        ids, positions, last, copies = _pack(cohort, self.shape.device)
        hidden = self.stage.forward_hidden(ids, positions, attend)
        logits = self.stage.logits(hidden[last])  # [distinct prompts, vocab]
        requests = [request for prompt in cohort for request in prompt.requests]
        del self.waiting[: len(requests)]
        new = RowTable.first(torch.tensor(requests, device=self.shape.device), self.keys,
                             positions[last].repeat_interleave(copies))
        self.choose(logits.repeat_interleave(copies, 0), new, groups)
        self.table = RowTable.join(self.table, new)
        self.groups += groups
        self.retire()
        while len(self.groups) > MOST_GROUPS:
            i = cheapest_merge([(group.rows, group.columns) for group in self.groups])
            self.groups[i : i + 2] = [RowGroup.merged(*self.groups[i : i + 2])]

    def decode(self) -> None:
        """Feed every row its newest token and sample the next one."""
        for group in self.groups:
            group.reserve()
        hidden = self.stage.forward_hidden(self.table.tokens, self.table.positions, DecodeAttend(self.groups))
        for group in self.groups:
            group.step()
        self.choose(self.stage.logits(hidden), self.table, self.groups)
        self.retire()

    def choose(self, logits: Tensor, table: RowTable, groups: Sequence[RowGroup]) -> None:
        """Sample a token for each row of `table`, `logits` `[rows, vocab]`, and take it down.

        tp index 0 decides and broadcasts. The gathered logits are the same on every tp rank (each slice is computed
        by its owner alone), but what follows need not be bit for bit: running sums on CUDA are not deterministic, and
        one differing token would part the ranks' caches for good. It costs one small message a step beside the two
        all-reduces of every layer, and saves the other ranks the sampling.
        """
        if self.tp.index == 0:
            tokens, log_probs = sample_tokens(logits, uniforms(table.keys, table.counts), self.params)
        if self.tp.size > 1:
            # fp64 holds every token id and every log-prob exactly
            mail = torch.empty(2, len(table), dtype=torch.float64, device=logits.device)
            if self.tp.index == 0:
                mail[0], mail[1] = tokens, log_probs
            dist.broadcast(mail, self.tp.ranks[0], group=self.tp.process_group)
            tokens, log_probs = mail[0].long(), mail[1]
        self.sampled.append((table.requests, tokens, log_probs))
        table.advance(tokens)
        for group in groups:
            group.sampled += 1

    def retire(self) -> None:
        """Take finished rows out of the batch and the caches. The step's one wait for the device is here."""
        sizes = [group.rows for group in self.groups]
        done = torch.zeros(len(self.table), dtype=torch.bool)
        if len(self.stops):
            done = torch.isin(self.table.tokens, self.stops).cpu()
        for group, part in zip(self.groups, done.split(sizes), strict=True):
            part |= group.sampled == self.params.max_new_tokens
        if not bool(done.any()):
            return
        offset, places = 0, []
        for group, size, part in zip(self.groups, sizes, done.split(sizes), strict=True):
            places.append(offset + (group.remove(part) if bool(part.any()) else torch.arange(size)))
            offset += size
        self.table = self.table.select(torch.cat(places).to(self.shape.device))
        self.groups = [group for group in self.groups if group.rows]

    def completions(self) -> list[Completion]:
        """Sort what the steps sampled by request."""
        if not self.sampled:
            return []
        requests, tokens, log_probs = (torch.cat(column).cpu() for column in zip(*self.sampled, strict=True))
        order = requests.argsort(stable=True)  # within a request the steps stay in order
        sizes = requests.bincount(minlength=len(self.prompts)).tolist()
        rows = zip(self.prompts, tokens[order].split(sizes), log_probs[order].split(sizes), strict=True)
        return [_completion(prompt, ids.tolist(), values.tolist(), self.params) for prompt, ids, values in rows]


def _pack(cohort: Sequence[SharedPrompt], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids and positions of the packed prompts `[tokens]`; each prompt's last place and its copies `[prompts]`."""
    lengths = torch.tensor([len(prompt.ids) for prompt in cohort])
    ids = torch.tensor([token for prompt in cohort for token in prompt.ids])
    ends = lengths.cumsum(0)
    positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
    copies = torch.tensor([len(prompt.requests) for prompt in cohort])
    return ids.to(device), positions.to(device), (ends - 1).to(device), copies.to(device)


def _completion(prompt: Prompt, ids: list[int], log_probs: list[float], params: SamplingParams) -> Completion:
    if not all(value == value for value in log_probs):
        raise FloatingPointError(f"prompt id {prompt.id}, sample {prompt.sample}: the log-prob of response token "
                                 f"{next(i for i, value in enumerate(log_probs) if value != value)} is NaN: "
                                 "the model's logits are not finite; check its weights and the learning rate")
    reason = FinishReason.STOP if ids[-1] in params.stop_ids else FinishReason.LENGTH
    return Completion(prompt.id, prompt.sample, prompt.ids, tuple(ids), tuple(log_probs), reason)


def _check_requests(prompts: Sequence[Prompt], params: SamplingParams, config: ModelConfig) -> None:
    """Refuse what cannot be generated, all faults at once."""
    room = config.max_position_embeddings - params.max_new_tokens
    faults = [f"stop id {stop} is not in the vocabulary of {config.vocab_size}"
              for stop in params.stop_ids if not 0 <= stop < config.vocab_size]
    for prompt in prompts:
        if not prompt.ids:
            faults.append(f"prompt id {prompt.id} is empty; it must have at least one token, such as the bos token")
        if len(prompt.ids) > room:
            faults.append(f"prompt id {prompt.id} has {len(prompt.ids)} tokens; with max_new_tokens "
                          f"{params.max_new_tokens} it may have {room} (max_position_embeddings "
                          f"{config.max_position_embeddings})")
    if faults:
        raise ValueError("generation: " + "; ".join(faults))
