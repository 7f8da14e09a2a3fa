"""`fledge upstream …`: the verbs about upstream's history, each imported when it is run."""

import typer

from ..lazy import add_lazy

app = typer.Typer(no_args_is_help=True, help="Upstream's history, from a clone or from the recorded ledger.")
for _name, _target, _help in (
    ("fetch", "upkeep:fetch", "Clone upstream's history, or name a clone that is here."),
    ("timeline", "verbs:timeline", "The chapter's twelve commits, or those of another group."),
    ("show", "verbs:show", "A commit: dates, title, lines per file."),
    ("diff", "verbs:diff", "What a commit changed."),
    ("files", "verbs:files", "The files of speculative/ at a ref, and the workers among them."),
    ("symbols", "verbs:symbols", "Classes, functions and methods of a file at a ref."),
    ("log", "verbs:log", "The commits that touch a file."),
    ("map", "source_map:show_map", "A stage's symbols beside upstream's."),
    ("launch", "launch:launch", "The same flags for the real engine."),
    ("check", "upkeep:check", "Prove ledger, source maps and claims against the clone."),
    ("record", "upkeep:record", "Write the ledger anew (for the course's author)."),
):
    add_lazy(app, _name, f"tools.upstream.{_target}", _help)
