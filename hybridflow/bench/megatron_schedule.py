"""megatron-core's 1F1B schedule as a rival, also on a CPU.

The only module that imports megatron-core. It is written for a GPU: while its step runs, and only then, its three
questions to CUDA on this path (the current device, a device-wide wait, one zero on the device) are answered for
the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from hybridflow.bench.plain_stage import PlainStage, Shape, Tokens, summed_loss
from hybridflow.parallel.mesh import Mesh

CPU = torch.device("cpu")


class _Alone:
    """A process group of one, as far as it is asked."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _TorchOnCpu:
    """The module `torch`, whose `zeros` knows no CUDA device."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: object, device: object = None, **options: object) -> Tensor:
        return torch.zeros(*size, device=CPU, **options)


class _Model(nn.Module):
    """The stage in the form that megatron-core calls: `[tokens, 1, hidden]` in and out, the input set beforehand."""

    def __init__(self, stage: PlainStage, config: object) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.stage, self.config, self.model_type = stage, config, ModelType.encoder_or_decoder
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        [self.input] = tensors

    def forward(self, ids: Tensor) -> Tensor:
        out = self.stage(ids if self.input is None else self.input.squeeze(1))
        return out.unsqueeze(1)


def megatron_step(stage: PlainStage, mesh: Mesh, shape: Shape, batches: Sequence[Tokens]) -> Callable[[], object]:
    """One step of megatron-core's schedule over the micro-batches.

    Raises:
        ImportError: megatron-core is not installed, or its own imports fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that faster kernels are not installed: none of them is on this path
        import megatron.core.transformer.multi_token_prediction  # noqa: F401  (the schedule does, in its first step)
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=shape.layers * mesh.pp.size, hidden_size=shape.hidden, num_attention_heads=shape.heads,
            pipeline_model_parallel_size=mesh.pp.size, pipeline_dtype=torch.float32, calculate_per_token_loss=True)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.dp_cp = _Alone()
    groups.pp, groups.embd, groups.pos_embd = mesh.pp.process_group, None, None
    model = _Model(stage, config)

    def forward(batches: Iterator[Tokens], model: nn.Module) -> tuple[Tensor, Callable]:
        batch = next(batches)
        return model(batch.input_ids), lambda out: (
            summed_loss(out.squeeze(1), batch.targets), torch.tensor(shape.tokens, dtype=torch.int), {})

    def step() -> None:
        with _cuda_on_cpu():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward, data_iterator=iter(batches), model=model, num_microbatches=len(batches),
                seq_length=shape.tokens, micro_batch_size=1, pg_collection=groups,
                p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config))
    return step


@contextmanager
def _cuda_on_cpu() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as patches:
        for target, stand_in in (("torch.cuda.current_device", lambda: CPU), ("torch.cuda.synchronize", lambda: None),
                                 ("megatron.core.pipeline_parallel.schedules.torch", _TorchOnCpu())):
            patches.enter_context(mock.patch(target, stand_in))
        yield
