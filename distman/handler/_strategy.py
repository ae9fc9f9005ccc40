"""How the ranks share the training of a model: each has all of it, or each has a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from distman.handler._sharding import is_sharded
from distman.manager import DistributedManager


@dataclasses.dataclass(frozen=True)
class Strategy:
    name: Literal["ddp", "fsdp"] = "ddp"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ("ddp", "fsdp"):
            raise ValueError(f"strategy must be 'ddp' or 'fsdp', got {self.name!r}. Choose one of them.")
        if not isinstance(self.options.get("reshard_after_forward"), bool | None):
            raise TypeError(
                "reshard_after_forward must be True or False, got "
                f"{self.options['reshard_after_forward']!r}. Call manager.wrap_fsdp() in a loop of your own for it."
            )

    @property
    def reshards(self) -> bool | None:
        """Whether modules are sharded again between the passes; None is all but the model itself."""
        value: bool | None = self.options.get("reshard_after_forward")
        return value

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module on this rank's device, unless it is to be made there as it is sharded."""
        is_on_meta = any(one.is_meta for one in [*module.parameters(), *module.buffers()])
        if is_on_meta and self.name != "fsdp":
            raise ValueError(
                "a model on the meta device must be sharded, got strategy='ddp'. Pass strategy='fsdp', and a function "
                "that sets its values: strategy_options={'initialize': function}."
            )
        return module if is_on_meta else module.to(DistributedManager().device)

    def shard(self, module: torch.nn.Module) -> bool:
        """Shard the module if this strategy does, and return whether it is sharded now. Collective."""
        if self.name == "fsdp":
            DistributedManager().wrap_fsdp(module, **self.options)
        return self.name == "fsdp" and is_sharded(module)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module that is not sharded as DistributedDataParallel; unchanged on one process. Collective."""
        options = self.options if self.name == "ddp" else {}
        return DistributedManager().wrap_ddp(module, **{"gradient_as_bucket_view": True, **options})
