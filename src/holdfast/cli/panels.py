"""What a person wants, as `holdfast --help` groups the commands."""

from typing import Any

from typer.core import TyperGroup

TRAIN, LOOK, PROVE, STORE, LAB = ORDER = ("Train", "Look", "Prove", "Store", "Lab")


class ByWhatIsWanted(TyperGroup):
    """Commands in the order of their panels; those of one panel as they were added."""

    def list_commands(self, ctx: Any) -> list[str]:
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        place = {panel: number for number, panel in enumerate(ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(str(panels[name]), len(ORDER)))
