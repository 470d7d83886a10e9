"""Where the first weights of a run come from, as its config says and its folder remembers. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Source:
    """The folder of another run, a safetensors file, a file of `torch.save` or a folder of DCP, as it was at the start.

    `step` is which snapshot of a run it is. `take` names the protected things that are given a state from it, all
    models if there is none; `partial` lets a model keep what the source does not have. `digest` is of all that it gives.
    """

    place: str
    step: int | None = None
    take: tuple[str, ...] = ()
    partial: bool = False
    digest: str = ""

    def __repr__(self) -> str:
        return repr(self.place) + (f" ({self.digest[:8]})" if self.digest else "")

    @property
    def wish(self) -> tuple[str, tuple[str, ...], bool]:
        """What was asked for, before anybody looked at it."""
        return self.place, self.take, self.partial

    def to_json(self) -> dict[str, Any]:
        """The source as JSON values."""
        return {**asdict(self), "take": list(self.take)}

    @classmethod
    def from_json(cls, said: Any) -> "Source":
        """The inverse of `to_json`."""
        texts = ("place", "digest")
        known = isinstance(said, Mapping) and set(said) == {"place", "step", "take", "partial", "digest"}
        if not (known and all(isinstance(said[name], str) for name in texts)):
            raise BadInput("not the config of a run: it does not say where its weights came from.")
        return cls(**{**said, "take": tuple(said["take"])})
