"""The page of claims: what the site says about upstream, sentence by sentence, each with its proof."""

from __future__ import annotations

from pathlib import Path

from ..upstream.claims import Claim, command, expected, read_claims
from ..upstream.history import UpstreamError
from .page import SNIPPETS, Problem, fence


def claims_of(repo: Path) -> list[Claim]:
    """Every claim, page by page. Raises Problem for one that is not well formed."""
    try:
        return read_claims(repo / "docs" / "data" / "claims")
    except UpstreamError as error:
        raise Problem(str(error)) from None


def files(repo: Path) -> dict[str, str]:
    """The list of all claims; a page links to one as claims.md#its-id."""
    found, parts = claims_of(repo), []
    counts = {kind: sum(claim.kind == kind for claim in found) for kind in ("git", "wheel", "told")}
    parts.append(
        f"{len(found)} claims: {counts['git']} are proven by a commit, {counts['wheel']} by the wheel, and "
        f"{counts['told']} are told only."
    )
    for page in dict.fromkeys(claim.page for claim in found):
        parts.append(f"## {page} {{ #page-{page} }}")
        parts += [entry(claim) for claim in found if claim.page == page]
    return {f"{SNIPPETS}/claims.md": "\n\n".join(parts)}


def entry(claim: Claim) -> str:
    """One claim with what proves it."""
    head = f"### {claim.id} {{ #{claim.id} }}\n\n{claim.says}\n\n"
    if claim.kind == "told":
        return f"{head}*Told, not proven:* {claim.proof}"
    what = expected(claim)
    return head + fence(command(claim), "sh") + (f"\nIt {what}." if what else "")
