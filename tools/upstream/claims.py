"""Claims about upstream on the pages of the site, each with its proof: `docs/data/claims/<page>.toml`.

    [[claim]]
    id = "part4-only-adds"
    says = "Part 4 removes no line."
    git = { commit = "815dce0554", removed = 0 }

`git` names a commit (a hash, a tag, or "815dce0554^" for the state before it) and what holds there:

- `path` with `exists`, `lines`, or `has` / `lacks` (a string in the file); `symbol` narrows the last three to
  one definition, which must be there;
- without `path`: `has` / `lacks` (a string in a line that the commit adds or removes);
- `added`, `removed` (lines, of `path` if given), `files` (how many the commit changes; with `path`, how many
  Python files stand below it at that commit).

`wheel` takes `path` with `symbol`, `has`, `lacks`, `lines`, `exists`. `told` says why there is no proof here.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..provenance import REPO
from .history import History, MissingObject, NoSuchFile, UpstreamError, as_pull, check_ref
from .symbols import changed_lines, excerpt, find_symbol, has_name, python_symbols
from .wheel import Wheel

CLAIMS = REPO / "docs" / "data" / "claims"
_OF_A_FILE = {"symbol": str, "has": str, "lacks": str, "lines": int, "exists": bool}
_KEYS = {
    "git": {"commit": str, "added": int, "removed": int, "files": int, "path": str, **_OF_A_FILE},
    "wheel": {"path": str, **_OF_A_FILE},
}


@dataclass(frozen=True)
class Claim:
    """One sentence of a page, and its proof: a table for "git" and "wheel", a sentence for "told"."""

    page: str
    id: str
    says: str
    kind: str
    proof: dict[str, Any] | str


class Disproved(UpstreamError):
    """The history says otherwise."""


def read_claims(folder: Path = CLAIMS) -> list[Claim]:
    """Every claim of every page. Raises UpstreamError, naming file and claim, for one that is malformed."""
    claims = [_claim(path, entry) for path in sorted(folder.glob("*.toml")) for entry in _entries(path)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise UpstreamError(f"{claim.page}.toml: the id {claim.id!r} is used twice.")
        seen.add(claim.id)
    return claims


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).get("claim", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UpstreamError(f"{path} is no TOML: {error}") from None


def _claim(path: Path, entry: dict[str, Any]) -> Claim:
    where = f"{path.name}, claim {entry.get('id', '?')!r}"
    kinds = [kind for kind in ("git", "wheel", "told") if kind in entry]
    if len(kinds) != 1 or set(entry) - {"id", "says", *kinds}:
        raise UpstreamError(f"{where}: give id, says and exactly one of git, wheel, told.")
    [kind] = kinds
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(entry.get("id"))) or not entry.get("says"):
        raise UpstreamError(f"{where}: the id is in kebab-case, and `says` is a sentence.")
    proof = entry[kind]
    if kind == "told":
        if not isinstance(proof, str) or not proof.strip():
            raise UpstreamError(f"{where}: `told` is a sentence on where it is from.")
        return Claim(path.stem, entry["id"], entry["says"], kind, proof)
    for name, value in proof.items():
        if name not in _KEYS[kind] or type(value) is not _KEYS[kind][name]:
            raise UpstreamError(f"{where}: {name} = {value!r} is not understood under {kind}.")
    needed = "commit" if kind == "git" else "path"
    if needed not in proof or ({"symbol", "lines", "exists"} & set(proof) and "path" not in proof):
        raise UpstreamError(f"{where}: {needed} is missing, or the path of the file that is meant.")
    if kind == "git" and as_pull(check_ref(proof["commit"]).removesuffix("^")) is not None:
        raise UpstreamError(f"{where}: git knows no {proof['commit']}; give the commit's hash or a tag.")
    return Claim(path.stem, entry["id"], entry["says"], kind, proof)


def prove(claim: Claim, history: History, wheel: Wheel | None) -> None:
    """Return if the claim holds, or is told. Raises Disproved where it does not hold.

    What the history cannot answer (MissingObject, NotRecorded, NoSuchRef) is raised as it comes.
    """
    proof = claim.proof
    if claim.kind == "git":
        history.resolve(proof["commit"])
        _prove_counts(proof, history)
        if "path" not in proof:
            if "has" in proof or "lacks" in proof:
                _prove_words(proof, changed_lines(history.diff(proof["commit"])), "what the commit changes")
        elif set(proof) & set(_OF_A_FILE) or set(proof) == {"commit", "path"}:
            _prove_file(proof, lambda: history.text(proof["commit"], proof["path"]))
    elif claim.kind == "wheel":
        if wheel is None:
            raise MissingObject("There is no wheel here. Run: fledge upstream fetch --wheel")
        _prove_file(proof, lambda: wheel.text(proof["path"]))


def _prove_counts(proof: dict[str, Any], history: History) -> None:
    if "added" in proof or "removed" in proof:
        changes = history.commit(proof["commit"]).files
        chosen = [c for c in changes if "path" not in proof or c.path == proof["path"]]
        for name in ("added", "removed"):
            if name in proof:
                _equal(f"lines {name}", proof[name], sum(getattr(c, name) or 0 for c in chosen))
    if "files" in proof and "path" in proof:
        found = [path for path in history.files(proof["commit"], proof["path"]) if path.endswith(".py")]
        _equal(f"Python files below {proof['path']}", proof["files"], len(found))
    elif "files" in proof:
        _equal("files changed", proof["files"], len(history.commit(proof["commit"]).files))


def _prove_file(proof: dict[str, Any], read) -> None:
    path = proof["path"]
    try:
        text = read()
    except NoSuchFile:
        if proof.get("exists") is False:
            return
        raise Disproved(f"there is no file {path}") from None
    if proof.get("exists") is False:
        raise Disproved(f"{path} is there")
    where = path
    if "symbol" in proof:
        text, where = _narrowed(text, path, proof["symbol"]), f"{path}:{proof['symbol']}"
    if "lines" in proof:
        _equal(f"lines of {where}", proof["lines"], text.count("\n"))
    _prove_words(proof, text, where)


def _narrowed(text: str, path: str, name: str) -> str:
    """The lines of a Python symbol; the whole file for a name in any other language."""
    if path.endswith(".py"):
        symbol = find_symbol(python_symbols(text), name)
        if symbol is not None:
            return excerpt(text, symbol)
    elif has_name(text, name):
        return text
    raise Disproved(f"{path} defines no {name}")


def _prove_words(proof: dict[str, Any], text: str, where: str) -> None:
    if "has" in proof and proof["has"] not in text:
        raise Disproved(f"{proof['has']!r} is not in {where}")
    if "lacks" in proof and proof["lacks"] in text:
        raise Disproved(f"{proof['lacks']!r} is in {where}")


def _equal(what: str, claimed: int, found: int) -> None:
    if claimed != found:
        raise Disproved(f"{what}: {found}, not {claimed}")


def expected(claim: Claim) -> str:
    """What the command shows where that is not plain to see; "" where it prints the words that are meant."""
    proof = claim.proof
    if claim.kind == "told":
        return ""
    if "lacks" in proof and "has" not in proof:
        return "prints 0"
    if proof.get("exists") is False:
        return "prints nothing" if claim.kind == "git" else "finds no such file"
    if "lines" in proof and not {"has", "lacks", "symbol"} & set(proof):
        return f"prints {proof['lines']}"
    if "files" in proof and "path" in proof:
        return f"prints {proof['files']}"
    sums = [f"{proof[name]:,} {name}" for name in ("added", "removed") if name in proof]
    files = [f"{proof['files']} files"] if "files" in proof else []
    return f"lists {', '.join(files + sums)}" if files or sums else ""


def command(claim: Claim) -> str:
    """The command with which a reader sees it, in a clone of upstream or with ours; "" for what is told."""
    if claim.kind == "told":
        return ""
    proof = claim.proof
    path = shlex.quote(proof.get("path", ""))
    words = next((shlex.quote(proof[name]) for name in ("has", "lacks") if name in proof), None)
    count = "-c" if "lacks" in proof and "has" not in proof else "-n"
    if claim.kind == "wheel":
        shown, listed = f"unzip -p sglang-0.5.23-*.whl {path}", f"unzip -l sglang-0.5.23-*.whl {path}"
        commit = "0.5.23"
    else:
        commit = shlex.quote(proof["commit"])
        shown, listed = f"git show {commit}:{path}", f"git ls-tree --name-only {commit} -- {path}"
    if words is not None and "symbol" in proof and proof["path"].endswith(".py"):
        name = shlex.quote(proof["symbol"])
        return f"fledge upstream symbols {commit} {path} {name} | grep {count} -F -- {words}"
    if words is not None and "path" in proof:
        return f"{shown} | grep {count} -F -- {words}"
    if words is not None:
        return f"git show --format= {commit} | grep {count} -F -- {words}"
    if "symbol" in proof:
        if proof["path"].endswith(".py"):
            return f"fledge upstream symbols {commit} {path} | grep -w -F -- {shlex.quote(proof['symbol'])}"
        return f"{shown} | grep -n -w -F -- {shlex.quote(proof['symbol'].rpartition('.')[2])}"
    if "lines" in proof:
        return f"{shown} | wc -l"
    if "files" in proof and "path" in proof:
        return f"git ls-tree -r --name-only {commit} -- {path} | grep -c '\\.py$'"
    if "added" in proof or "removed" in proof or "files" in proof:
        return f"git show --numstat --format= {commit}" + (f" -- {path}" if path != "''" else "")
    return listed if "path" in proof else f"git log -1 {commit}"
