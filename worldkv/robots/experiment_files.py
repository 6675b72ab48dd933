"""conf.yaml and metadata.json of a checkpoint's experiment_cfg, read by path. Does not open them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ExperimentFiles:
    """The two files, read by path. Faults are noted, not raised, so that one run finds them all."""

    def __init__(self, conf: Mapping[str, Any], metadata: Mapping[str, Any], tag: str) -> None:
        self.roots = {"conf.yaml": conf, "metadata.json": metadata}
        self.tag = tag
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def readable(self) -> bool:
        """Whether the embodiment is there at all; nothing else can be checked before."""
        if not self.roots["conf.yaml"]:
            return self.metadata() is not None
        steps = self.conf("transforms", self.tag, "transforms")
        if steps is not None and not isinstance(steps, list):
            self.fault(f"conf.yaml: transforms.{self.tag}.transforms: expected a list, got {steps!r}")
        return self.metadata() is not None and isinstance(steps, list)

    def conf(self, *path: str, required: bool = True) -> Any:
        return self._get("conf.yaml", path, required)

    def metadata(self, *path: str, required: bool = True) -> Any:
        """The value at `path` under the embodiment's own entry."""
        return self._get("metadata.json", (self.tag, *path), required)

    def _get(self, file: str, path: tuple[str, ...], required: bool) -> Any:
        value: Any = self.roots[file]
        for depth, key in enumerate(path, start=1):
            if not isinstance(value, Mapping) or key not in value:
                if required:
                    self.fault(f"{file}: {'.'.join(path[:depth])}: missing")
                return None
            value = value[key]
        return value

    def flag(self, name: str) -> bool:
        return bool(self.conf(name, required=False))

    def steps(self, *classes: str) -> list[Mapping[str, Any]]:
        """The transforms whose `_target_` ends in one of these class names."""
        steps = self.roots["conf.yaml"]["transforms"][self.tag]["transforms"]
        return [s for s in steps if isinstance(s, Mapping) and str(s.get("_target_")).split(".")[-1] in classes]

    def step_value(self, name: str, key: str, default: Any = None) -> Any:
        """Argument `key` of the transform called `name`."""
        steps = self.steps(name)
        value = steps[0].get(key, default) if steps else None
        if value is None:
            self.fault(f"{self.step_path(name)}{'.' + key if steps else ''}: missing")
        return value

    def step_path(self, name: str) -> str:
        return f"conf.yaml: transforms.{self.tag}.transforms[{name}]"

    def step_size(self, name: str, key: str, default: int | None = None) -> int:
        """As `step_value`, a positive whole number; 0 where there is a fault."""
        value = self.step_value(name, key, default)
        if value is not None and not is_size(value):
            self.fault(f"{self.step_path(name)}.{key}: expected a positive whole number, got {value!r}")
        return value if is_size(value) else 0


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
