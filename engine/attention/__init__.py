"""Attention through block tables: `attend` is what models call, once for each layer.

"gather"   each row reads its keys for itself: a view of the pool where its slots ascend by one, else gathered
"tree"     what rows share is read once for all of them, wherever they share anything
"auto"     whichever is predicted to be faster, node by node; what rows do not share may be read side by side

tree       `attend`: carries out the plan of a step
plan       which parts there are: shared nodes, tails, rows side by side
costs      what a part costs, by measured constants
gather     each row for itself
partial    one part: values and log-sum-exps
reference  the slow truth that all of them are tested against
"""

from .tree import attend

__all__ = ["attend"]
