"""`fledge stages …`: the directories under stages/, side by side."""

import typer

from ..lazy import add_lazy

app = typer.Typer(no_args_is_help=True, help="List the stages, keep them together, show what a step changes.")
add_lazy(app, "list", "tools.stages.listing:list_stages", "The stages in the order of the story.")
add_lazy(app, "check", "tools.stages.check:check", "Fail where neighbours differ without a reason, and more.")
add_lazy(app, "carry", "tools.stages.carry:carry", "Spread one stage's change to the others, all or nothing.")
add_lazy(app, "diff", "tools.stages.diff:diff", "What a step changes, with unchanged functions folded away.")
