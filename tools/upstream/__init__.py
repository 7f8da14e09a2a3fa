"""Upstream's history beside our stages: read from a reader's clone of sgl-project/sglang, or from the ledger.

`History` (history.py) is the one interface; `open_history` (source.py) says which of its two implementations
this reader has: `CloneHistory` (clone.py) or `LedgerHistory` (ledger.py). Nothing in a clone is ever executed
(quiet_git.py), and nothing of upstream's code is kept in this repository, only facts about it.
"""
