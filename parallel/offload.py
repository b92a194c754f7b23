"""The host as a place for tensors: copies beside the computation, and whole roles put away between phases.

Owns pinned host buffers and the side stream. It never knows what the tensors mean. Without an accelerator the same
calls make ordinary copies, so that offloaded runs can be debugged on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


def host_buffer(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised host tensor in the shape of `like`, pinned where that is on an accelerator."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.device.type == "cuda")


class CopyStream:
    """Where copies between an accelerator and pinned host memory run, beside the computation; on a CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_compute(self) -> None:
        """Let the copies that follow wait for all that the computation has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def before_compute(self) -> None:
        """Let the computation that follows wait for the copies queued so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def copy(self, dst: Tensor, src: Tensor) -> torch.cuda.Event | None:
        """Queue one copy; what `landed` waits for. Both tensors must stay as they are until then."""
        with self._queue():
            dst.copy_(src, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def landed(copy: torch.cuda.Event | None) -> None:
        """Have the host wait for a copy."""
        if copy is not None:
            copy.synchronize()

    def _queue(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class HostCopy:
    """The memory of some tensors, which can be moved to the host and back as one: a role between its phases.

    It moves storages, so every view of one (parameters of a flat buffer, masters that are parameters) is valid again
    after `to_device()`, and reading one before is an error. Tensors that are on the host already are moved all the
    same where there is no accelerator. Host buffers are made once and reused.

    Args:
        tensors: whose storages to move; views of one storage count once.
        scratch: whose contents are not needed again (main gradients between steps): freed without a copy, zeros after.
    Example:
        >>> actor = HostCopy([bucket.params for bucket in grads.buckets] + optimizer.tensors())
        >>> actor.to_host()  # the generation engine has the device to itself
        >>> actor.to_device()
    """

    def __init__(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        kept, scratch = _storages(tensors), _storages(scratch)
        device = next((view.device for view in (*kept.values(), *scratch.values()) if view.device.type != "cpu"),
                      torch.device("cpu"))
        self.on_host = False
        self._kept = [_Moved(view, host_buffer(view)) for view in kept.values() if view.device == device]
        self._scratch = [view for key, view in scratch.items() if key not in kept and view.device == device]
        self._stream = CopyStream(device)

    @property
    def nbytes(self) -> int:
        """Bytes that `to_host` frees."""
        return sum(view.numel() for view in (*(moved.view for moved in self._kept), *self._scratch))

    def to_host(self) -> None:
        """Copy to the host and free the memory here. Work that the computation has queued is still done."""
        assert not self.on_host, "these tensors are on the host already"
        self.on_host = True
        self._stream.after_compute()
        copies = [self._stream.copy(moved.host, moved.view) for moved in self._kept]
        for moved, copy in zip(self._kept, copies, strict=True):
            self._stream.landed(copy)
            moved.view.untyped_storage().resize_(0)
        for view in self._scratch:
            view.untyped_storage().resize_(0)

    def to_device(self) -> None:
        """Take the memory again and copy back; the computation waits for it, the host does not."""
        assert self.on_host, "these tensors were not moved to the host"
        self.on_host = False
        for moved in self._kept:
            moved.view.untyped_storage().resize_(moved.view.numel())
        self._stream.after_compute()  # the memory may have been that of tensors which queued work still reads
        for moved in self._kept:
            self._stream.copy(moved.view, moved.host)
        self._stream.before_compute()
        for view in self._scratch:
            view.untyped_storage().resize_(view.numel())
            view.zero_()


@dataclass(frozen=True)
class _Moved:
    """A storage as bytes, and its place on the host."""

    view: Tensor
    host: Tensor


def _storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The storage of each tensor as bytes, by address, each once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found
