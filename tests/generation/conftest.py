import pytest
import torch


@pytest.fixture
def poisoned_memory(monkeypatch):
    """`torch.empty` gives NaN, so that what is read before it is written shows."""
    empty = torch.empty

    def nan(*size, **options):
        memory = empty(*size, **options)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", nan)
