"""Main gradients: where every backward of an optimizer step adds up, in fp32 at least.

Owns the hooks that fill the buckets, and their one reduction, which starts inside the last backward. It never divides
(losses carry their global weights, so every reduction is a sum) and never steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hybridflow.parallel.buckets import SHARDED, GradSync, Slot, make_buckets
from hybridflow.parallel.collectives import Pending, all_reduce
from hybridflow.parallel.comm_hook import CommHook, GradBucket, hook_for, plain
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.state_map import FlatLayout, FlatPlace, StateKind, storage_name
from hybridflow.parallel.weight_grads import WeightGrads, attach

MAX_IN_FLIGHT = 2  # reductions under way: bounds their memory, and what ZeRO-2 holds besides shares


class MainGrads:
    """The main gradients of one model's parameters on this rank.

    Making it moves the parameters into flat buffers (their values and names stay; `named_parameters` gives views).
    From then on every backward adds into `grads` and leaves `param.grad` None. The order of a step is:
    backwards; before the last one of each chunk `arm(its buckets)`, after it `start(bucket)` of each; `finish()`;
    optimizer step; `zero()`. `reduce()` is all starts and the finish, for who does not overlap.

    An armed bucket's reduction starts as soon as its last parameter has got its gradient, yet never before that of the
    buckets armed before it: so all ranks of the data group start the same reductions in the same order. Where backwards
    are split, only weights of linears get their gradients after the arming, and only they are waited for.

    Attributes:
        buckets: in the order in which backward completes them.
        reduced_bytes: bytes that this rank put into reductions so far.
        num_reductions: reductions of a bucket over the data group so far: one for each bucket and optimizer step,
            whatever the number of micro-batches.

    Args:
        module: this rank's chunks; parameters that do not require gradients are left alone.
        syncs: by parameter name; parameters without an entry are `SHARDED`.
        data: the ranks that hold the same weights.
        zero_stage: 0: every rank has all reduced gradients; 1: each has its share, and the optimizer state of it;
            2: the same, and it frees a bucket's full gradients as soon as they are reduced. Between steps it holds
            shares only.
        chunk_of: the chunk of a parameter (that which completes it last), by name.
        bucket_bytes: of the main gradients of one bucket at most, unless one parameter alone has more. None: no bound.
        reduce_dtype: in which gradients travel (sums stay in theirs); None for their own.
        hook: how a bucket is reduced, in place of the hook that `reduce_dtype` chooses.
        weight_grads: where the module's linears put their weight gradients, also those of a later W action.
    Raises:
        ValueError: another zero_stage, a bucket size that holds nothing, a sync that names no parameter, or both a hook
            and a reduce_dtype; later, a hook's result that is no share.
    """

    def __init__(
        self, module: nn.Module, syncs: Mapping[str, GradSync], data: AxisGroup, zero_stage: int = 0, *,
        chunk_of: Callable[[str], int] = lambda name: 0, bucket_bytes: int | None = None,
        reduce_dtype: torch.dtype | None = None, hook: CommHook | None = None, weight_grads: WeightGrads | None = None,
    ) -> None:
        if zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage {zero_stage} must be 0 (reduce all), 1 (shard optimizer state) or "
                             "2 (shard gradients too)")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes {bucket_bytes} must be at least 1, or None for buckets of any size")
        if hook is not None and reduce_dtype is not None:
            raise ValueError("a hook decides about the wire itself: give it or a reduce_dtype")
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        unknown = syncs.keys() - {name for name, _ in module.named_parameters()}
        if unknown:
            raise ValueError(f"gradient syncs name no parameter of the stage: {sorted(unknown)}")
        self.data = data
        all_syncs = {name: SHARDED for name, _ in named} | dict(syncs)
        self.buckets = make_buckets(named, all_syncs, data, zero_stage, chunk_of, bucket_bytes)
        self.sharded = zero_stage > 0 and data.size > 1
        self.reduced_bytes = 0
        self.num_reductions = 0
        self._hook = hook if hook is not None else hook_for(reduce_dtype)
        on_cpu = self.buckets[0].params.device.type == "cpu"  # where collectives are exchanges, which hold what arrives
        self._holds_memory = zero_stage == 2 or self._hook is not plain or on_cpu
        self._missing: dict[int, set[str]] = {}  # armed buckets in order, and their parameters without gradient yet
        self._by_linears: set[str] = set()  # names of parameters whose gradients come from `weight_grads`
        self._started: set[int] = set()
        self._in_flight: deque[tuple[int, Pending]] = deque()
        self._is_finished = False
        self._listen(dict(named), [] if weight_grads is None else attach(module, weight_grads), weight_grads)

    @property
    def bucket_chunks(self) -> tuple[int, ...]:
        """The chunk of each bucket."""
        return tuple(bucket.chunk for bucket in self.buckets)

    def arm(self, buckets: tuple[int, ...]) -> None:
        """Let these buckets start by themselves in the backward that follows, which is the last one to touch them."""
        for index in sorted(buckets):
            assert index not in self._started and index not in self._missing, f"bucket {index} is armed once a step"
            self._missing[index] = {slot.name for slot in self.buckets[index].slots}

    def start(self, bucket: int) -> None:
        """Make sure that the reduction of `bucket` has started, and those armed before it. Collective."""
        assert not self._is_finished, "gradients are reduced once a step: call zero() first"
        if bucket in self._started:
            return
        self._missing.setdefault(bucket, set())
        for index in list(self._missing):
            self._launch(index)
            if index == bucket:
                return

    def finish(self) -> None:
        """Wait for all reductions, then sum over each parameter's own groups. Collective, once a step.

        Every bucket must have been started.
        """
        assert not self._is_finished, "gradients are reduced once a step: call zero() first"
        missing = set(range(len(self.buckets))) - self._started
        assert not missing, f"buckets {sorted(missing)} were never started"
        self._settle(at_most=0)
        self._is_finished = True
        for bucket in self.buckets:
            for group in bucket.groups:
                all_reduce(bucket.share, group)
                self.reduced_bytes += bucket.share.nbytes if group.size > 1 else 0

    def reduce(self) -> None:
        """Start what has not started yet and finish. Collective, once a step."""
        for index in range(len(self.buckets)):
            self.start(index)
        self.finish()

    def zero(self) -> None:
        """Forget all gradients."""
        while self._in_flight:  # left by a step that raised, on all ranks alike
            self._in_flight.popleft()[1].wait()
        for bucket in self.buckets:
            bucket.clear()
        self._missing.clear()
        self._started.clear()
        self._is_finished = False

    def storages(self) -> dict[str, Tensor]:
        """The reduced gradient shares, as `state_map` names them."""
        return {storage_name(StateKind.MAIN_GRAD, i): bucket.share for i, bucket in enumerate(self.buckets)}

    def layout(self) -> FlatLayout:
        """Where this rank's shares of the parameters lie."""
        return {slot.name: FlatPlace(index, slot.start, bucket.start, bucket.end)
                for index, bucket in enumerate(self.buckets) for slot in bucket.slots}

    def _listen(self, named: Mapping[str, nn.Parameter], weights: list[nn.Parameter],
                weight_grads: WeightGrads | None) -> None:
        """Have every gradient added to its main gradient, and counted as arrived."""
        by_linears = {id(weight) for weight in weights}
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                param = named[slot.name]
                param.register_post_accumulate_grad_hook(self._accumulate(index, slot))
                if id(param) in by_linears:
                    assert weight_grads is not None
                    self._by_linears.add(slot.name)
                    weight_grads.register(param, self._main_grad(index, slot),
                                          self._ready_by_linear(index, slot, weight_grads))

    def _accumulate(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        main_grad, ready = self._main_grad(index, slot), self._ready(index, slot)

        def accumulate(param: Tensor) -> None:
            if param.grad is None:  # autograd calls for gradients that are none, too: those of linears' weights
                return
            main_grad().add_(param.grad)
            param.grad = None
            ready()

        return accumulate

    def _main_grad(self, index: int, slot: Slot) -> Callable[[], Tensor]:
        def main_grad() -> Tensor:
            assert index not in self._started, f"{slot.name} got a gradient after its bucket {index} was reduced"
            return self.buckets[index].main_grad(slot)

        return main_grad

    def _ready(self, index: int, slot: Slot) -> Callable[[], None]:
        def ready() -> None:
            if index in self._missing:
                self._missing[index].discard(slot.name)
                self._start_complete()

        return ready

    def _ready_by_linear(self, index: int, slot: Slot, weight_grads: WeightGrads) -> Callable[[], None]:
        ready = self._ready(index, slot)

        def ready_by_linear() -> None:
            if weight_grads.runs_kept:  # what does not come from linears came in the backwards before
                for missing in self._missing.values():
                    missing.intersection_update(self._by_linears)
            ready()

        return ready_by_linear

    def _start_complete(self) -> None:
        """Start armed buckets from the first, up to one that still misses a gradient."""
        for index, missing in list(self._missing.items()):
            if missing:
                return
            self._launch(index)

    def _launch(self, index: int) -> None:
        del self._missing[index]
        self._started.add(index)
        bucket = self.buckets[index]
        if self.data.size == 1:
            return
        if self._holds_memory:
            # Blocks where all ranks of the data group block: they start the same buckets in the same order.
            self._settle(at_most=MAX_IN_FLIGHT - 1)
        pending = self._hook(GradBucket(index, bucket.grads, bucket.share, self.data, self.sharded))
        self._in_flight.append((index, pending))
        self.num_reductions += 1
        self.reduced_bytes += pending.nbytes

    def _settle(self, at_most: int) -> None:
        """Complete the oldest reductions until `at_most` are under way."""
        while len(self._in_flight) > at_most:
            index, pending = self._in_flight.popleft()
            reduced, share = pending.wait(), self.buckets[index].share
            if reduced.shape != share.shape:
                raise ValueError(f"the communication hook gave {tuple(reduced.shape)} for bucket {index}, whose share "
                                 f"is {tuple(share.shape)}")
            self.buckets[index].settle(reduced)
