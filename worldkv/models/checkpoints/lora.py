"""The names of a LoRA run's checkpoint as those of the model it means, and what each adapted weight adds up from.

peft wraps a model: its own tensors move under `base_model.model.`, an adapted layer's weight is `X.base_layer.weight`
beside `X.lora_A.NAME.weight` [rank, in] and `X.lora_B.NAME.weight` [out, rank]. Merged, it is W + alpha / rank * B A.
Source: Hu et al., "LoRA" (2021). Knows names and shapes; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from worldkv.models.checkpoints.words import shown

_WRAPPER, _BASE = "base_model.model.", ".base_layer."
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.(?P<name>\w+))?\.weight")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapter:
    """Stored names of the two factors, and the factor before their product."""

    down: str  # A, [rank, in]
    up: str  # B, [out, rank]
    scale: float

    def merged(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """float32, whatever the parts are stored in."""
        import torch

        return torch.addmm(weight.float(), up.float(), down.float(), alpha=self.scale)


def is_lora(names: Shapes) -> bool:
    return any(_WRAPPER in name or ".lora_" in name for name in names)


def plain_names(
    shapes: Shapes, alpha: object, problems: list[str], base: Shapes, alpha_field: str
) -> tuple[dict[str, str], dict[str, Adapter]]:
    """(model's name -> stored name, adapted weight -> its adapter). Appends what cannot be merged to `problems`.

    `alpha` was read from `alpha_field`. `base`: of tensors that lie elsewhere, by the model's names.
    """
    stored: dict[str, str] = {}
    factors: dict[str, dict[str, str]] = {}
    adapters_of: dict[str, set[str]] = {}
    for name in shapes:
        plain = name.replace(_WRAPPER, "", 1).replace(_BASE, ".", 1)
        found = _ADAPTER.fullmatch(plain)
        if found is not None:
            weight = f"{found['layer']}.weight"
            factors.setdefault(weight, {})[found["part"]] = name
            adapters_of.setdefault(weight, set()).add(found["name"] or "")
        elif ".lora_" in plain:
            problems.append(f"{name}: this kind of adapter is not known; expected lora_A and lora_B of linear layers")
        else:
            stored[plain] = name
    if factors and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6):
        problems.append(f"{alpha_field} must say how adapters are scaled, got {shown(alpha)}")
        return stored, {}
    adapters = {}
    weights = {**base, **{name: shapes[origin] for name, origin in stored.items()}}
    absent = [weight for weight in factors if weight not in weights]
    if absent:
        problems.append(
            f"{len(absent)} weights have adapters here and are not here themselves ({absent[0]}, ...): name the "
            "folder of the model that this run was trained from with --base DIR"
        )
    for weight, parts in factors.items():
        trouble = _trouble(weight, parts, adapters_of[weight], weights, shapes)
        if trouble is not None:
            problems.append(trouble)
        if trouble is not None or weight in absent:
            continue
        rank = shapes[parts["A"]][0]
        adapters[weight] = Adapter(parts["A"], parts["B"], float(alpha) / rank)  # type: ignore[arg-type]
    return stored, adapters


def _trouble(weight: str, parts: Mapping[str, str], names: set[str], weights: Shapes, shapes: Shapes) -> str | None:
    """Why this weight cannot be merged."""
    if len(names) > 1:
        return f"{weight}: expected one adapter, got {sorted(names)}"
    if len(parts) < 2:
        return f"{weight}: lora_{'B' if 'A' in parts else 'A'} is missing beside {next(iter(parts.values()))}"
    if weight not in weights:
        return None  # told before, for all of them at once
    base, down, up = weights[weight], shapes[parts["A"]], shapes[parts["B"]]
    fits = len(base) == len(down) == len(up) == 2 and (up[0], down[1]) == base and down[0] == up[1] > 0
    if not fits:
        return f"{weight}: {list(base)} does not fit its adapter, B {list(up)} times A {list(down)}"
    return None
